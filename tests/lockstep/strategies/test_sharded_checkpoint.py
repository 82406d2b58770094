"""A folder of shards holds what a file holds, is complete only with its manifest, and runs nothing."""

import json
import os
import pickle
import shutil
from dataclasses import asdict

import pytest
import torch

from lockstep.runs.errors import UserError
from lockstep.runs.files import checksum_of
from lockstep.strategies.sharded_checkpoint import check, is_shard_folder, join, load_checkpoint, read, split
from strategy_runs import adamw, one, plain_sgd, ranks, sgd

OPTIMIZERS = {"sgd with momentum": sgd, "sgd, whose state is empty": plain_sgd, "adamw": adamw}


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-13)
    return a == b


def test_split_and_join_are_inverse():
    checkpoint = {
        "epoch": 3,
        "state_dict": {"net.a": torch.ones(2), "net.b.c": torch.zeros(1)},
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(1.0), "lazy": True}, 1: {}}, "param_groups": [{"lr": 0.1}]}
        ],
    }
    tensors, rest = split(checkpoint)
    assert sorted(tensors) == ["optimizer_states/0/0/step", "state_dict/net.a", "state_dict/net.b.c"]
    assert same(join(tensors, rest), checkpoint)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_folder_a_file_and_one_process_hold_the_same(tmp_path, optimizer):
    one(optimizer=optimizer, save=tmp_path / "one.ckpt")
    ranks("fsdp", 2, optimizer=optimizer, save=tmp_path / "file.ckpt")
    ranks("fsdp", 2, optimizer=optimizer, save=tmp_path / "folder.ckpt", own={"sharded_checkpoint": True})
    expected = load_checkpoint(tmp_path / "one.ckpt")
    assert not is_shard_folder(tmp_path / "file.ckpt") and is_shard_folder(tmp_path / "folder.ckpt")
    assert same(load_checkpoint(tmp_path / "file.ckpt"), expected)
    assert same(load_checkpoint(tmp_path / "folder.ckpt"), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards") / "last-step00000002.ckpt"
    ranks("fsdp", 2, steps=2, save=path, own={"sharded_checkpoint": True})
    return path


def test_each_rank_wrote_its_part_and_the_manifest_names_them(folder):
    manifest = check(folder, hashes=True)
    shards = [name for name in manifest["files"] if name.endswith(".safetensors")]
    assert manifest["world_size"] == 2 and len(shards) == 2 and "rest.pt" in manifest["files"]
    assert sorted(os.listdir(folder)) == sorted([*manifest["files"], "manifest.json"])
    assert manifest["tensors"]["state_dict/net.head.weight"] == [7, 10]
    sizes = [manifest["files"][name]["bytes"] for name in shards]
    assert max(sizes) < 1.6 * min(sizes)


def test_writing_again_with_fewer_ranks_leaves_no_old_shard(tmp_path):
    for world_size in (3, 2):
        ranks("fsdp", world_size, steps=1, save=tmp_path / "last.ckpt", own={"sharded_checkpoint": True})
    assert check(tmp_path / "last.ckpt")["world_size"] == 2
    assert len(list((tmp_path / "last.ckpt").glob("*.safetensors"))) == 2


def test_a_folder_that_is_not_whole_is_refused(folder, tmp_path):
    def copy(name):
        return shutil.copytree(folder, tmp_path / name)

    without = copy("without")
    (without / "manifest.json").unlink()
    assert not is_shard_folder(without)
    torn = copy("torn")
    shard = next(torn.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"torn: {shard.name}"):
        read(torn)
    flipped = copy("flipped")
    shard = next(flipped.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=f"damaged: {shard.name}"):
        check(flipped, hashes=True)
    mixed = copy("mixed")
    shutil.copy(next(mixed.glob("*.safetensors")), mixed / "shard-00009-model-00001-of-00001.safetensors")
    with pytest.raises(UserError, match="holds shard-00009.*another checkpoint"):
        read(mixed)
    newer = copy("newer")
    manifest = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(UserError, match="shard format 99"):
        read(newer)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"files": {}}', '{"files": [], "format": 1}', '{"files": {"a": 1}, "format": 1}']
)
def test_a_manifest_of_another_form_is_no_traceback(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="is no complete folder of shards"):
        check(tmp_path)


def test_shards_that_state_more_than_they_have_make_no_memory(folder, tmp_path):
    """A head of a few bytes may name a tensor of terabytes."""
    evil = shutil.copytree(folder, tmp_path / "evil")
    shard = sorted(evil.glob("*.safetensors"))[0]
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    name = next(name for name in head if name.startswith("state_dict/"))
    sharding = json.loads(head["__metadata__"]["DCP_SHARDING_INFO"])
    sharding[name]["saved_offsets"] = [2**40 for _ in sharding[name]["saved_offsets"]]
    head["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(sharding)
    made = json.dumps(head).encode()
    shard.write_bytes(len(made).to_bytes(8, "little") + made + data[8 + length :])
    manifest = json.loads((evil / "manifest.json").read_text())
    manifest["files"][shard.name] = asdict(checksum_of(shard))
    (evil / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"loaded safely: its shards state \d+ bytes and have \d+"):
        read(evil)


class Canary:
    def __reduce__(self):
        return os.mkdir, ("canary",)


def test_nothing_in_a_folder_chooses_code(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    evil = shutil.copytree(folder, tmp_path / "evil")
    torch.save({"callbacks": Canary()}, evil / "rest.pt")
    (evil / ".metadata").write_bytes(pickle.dumps(Canary()))
    manifest = json.loads((evil / "manifest.json").read_text())
    manifest["files"]["rest.pt"] = asdict(checksum_of(evil / "rest.pt"))
    (evil / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="no checkpoint that can be loaded safely: it asks for posix.mkdir"):
        read(evil)
    assert not (tmp_path / "canary").exists()
