"""Checkpoint files: whole ones are found, others are refused in a sentence."""

import json
import re
from collections import Counter

import numpy as np
import pytest
import torch

from kills import differences
from lockstep.checkpoints import files as files
from lockstep.checkpoints.files import (
    Sidecar,
    complete_checkpoints,
    fault_of,
    newest_whole,
    read_sidecar,
    sidecar_path,
)
from lockstep.checkpoints.load import read_checkpoint
from lockstep.checkpoints.random_state import random_state
from lockstep.process.errors import UserError


def make(folder, kind, step, data=b"weights"):
    path = files.unused_path(folder, kind, step)
    path.write_bytes(data)
    files.write_sidecar(path, Sidecar(step))
    return path


def test_the_newest_checkpoint_that_is_not_damaged_is_used(tmp_path, caplog):
    good, torn, flipped = (
        make(tmp_path, "last", 10),
        make(tmp_path, "best", 30),
        make(tmp_path, "last", 30),
    )
    make(tmp_path, "best", 5)
    (tmp_path / "last-step00000040.ckpt").write_bytes(b"no sidecar")
    assert [path for path, _ in complete_checkpoints(tmp_path)] == [
        flipped,
        torn,
        good,
        tmp_path / "best-step00000005.ckpt",
    ]
    torn.write_bytes(b"weigh")
    flipped.write_bytes(b"weighty")
    assert newest_whole(tmp_path) == good
    assert ["sha256" in line for line in caplog.messages] == [True, True]
    assert flipped.name in caplog.messages[0] and torn.name in caplog.messages[1]


def test_links_are_independent_and_leftovers_are_removed(tmp_path):
    best, last = make(tmp_path, "best", 7), tmp_path / "last-step00000007.ckpt"
    files.link(best, last)
    files.remove(best)
    (tmp_path / ".last-step00000002.ckpt.x.part").write_bytes(b"half")
    files.mark_unfinished(tmp_path / "last-step00000002.ckpt")
    (tmp_path / "last-step00000002.ckpt").write_bytes(b"no sidecar")
    files.remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        last.name,
        sidecar_path(last).name,
    } and not fault_of(last)


def test_files_of_the_user_among_the_checkpoints_stay(tmp_path):
    for name in ("best-step00000009.ckpt", "mine.ckpt", ".download.part"):
        (tmp_path / name).write_bytes(b"mine")
    files.remove_leftovers(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    best = make(tmp_path, "best", 7)
    copy = best.with_name("best-step00000007-2.ckpt")
    for path in (best, sidecar_path(best)):
        copy.with_name(path.name.replace(best.stem, copy.stem)).write_bytes(path.read_bytes())
    assert files.is_copy(copy, read_sidecar(copy)) and not files.is_copy(best, read_sidecar(best))


def test_saving_a_step_again_keeps_its_first_checkpoint(tmp_path):
    """A run that stopped in the validation of a step saves that step a second time."""
    first = make(tmp_path, "last", 30, b"the first")
    again = files.unused_path(tmp_path, "last", 30)
    again.write_bytes(b"half of")
    assert again.name == "last-step00000030-2.ckpt" and newest_whole(tmp_path) == first
    third = make(tmp_path, "last", 30, b"the third")
    assert [found for found, _ in complete_checkpoints(tmp_path, "last")] == [third, first]


def test_a_sidecar_that_an_older_version_wrote(tmp_path):
    held = {"bytes": 3, "sha256": "cd" * 32, "epoch": 1, "batches_done": 10, "batches_per_epoch": 10,
            "phase": "epoch_end", "step": 20, "world_size": 2, "metric": {"val/acc": 0.5}}  # fmt: skip
    sidecar_path(tmp_path / "x.ckpt").write_text(json.dumps(held))
    assert read_sidecar(tmp_path / "x.ckpt") == Sidecar(20, 3, "cd" * 32, 1, {"val/acc": 0.5})


@pytest.mark.parametrize(
    "change",
    [{"step": "x"}, {"step": -1}, {"sha256": "x"}, {"metric": {"a": "b"}}, None],
)
def test_a_sidecar_with_nonsense_in_it_makes_no_checkpoint(tmp_path, change):
    path = make(tmp_path, "last", 1)
    held = json.loads(sidecar_path(path).read_text())
    sidecar_path(path).write_text(
        json.dumps({**held, **change} if change else held)[: None if change else -2]
    )
    assert (
        "no readable" in fault_of(path)
        and newest_whole(tmp_path) is None
        and list(complete_checkpoints(tmp_path)) == []
    )


# Checkpoint files are tensors and plain values; anything else is refused in one sentence.

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.uint16,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float64,
)


def whole():
    """A checkpoint as a run writes it, in small."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    facts = {
        "class_names": ["a", "ü"],
        "num_classes": 2,
        "image_size": 8,
        "channels": 1,
        "mean": [0.5],
        "std": [0.2],
    }
    more = {f"extra{n}": torch.zeros(3, 2, dtype=dtype) for n, dtype in enumerate(DTYPES)}
    return {
        "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.6.6", "state_dict": net.state_dict() | more,
        "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {"Checkpoints": {"best_value": 0.5}},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [{"milestones": Counter([1, 2]), "last": 3}],
        "lockstep": {"config": {"model": {"widths": [1, 2]}, "seed": None}, "data": facts, "random": [random_state()]},
    }  # fmt: skip


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    content = whole()
    torch.save(content, tmp_path / "x.ckpt")
    found = read_checkpoint(tmp_path / "x.ckpt")
    assert type(found["state_dict"]) is dict and found["lr_schedulers"] == content["lr_schedulers"]
    assert differences(found, content) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_dict": []}, "it holds no state_dict"),
        ({"state_dict": {"a": 1}}, "its state_dict does not map names to tensors"),
        ({"lockstep": ["nonsense"]}, "safely: its lockstep is a list .* in place of a dict"),
        ({"lockstep": {"config": "x"}}, "safely: its config is a str .* in place of a dict"),
        ({"lockstep": {"data": "x"}}, "safely: its data is a str .* in place of a dict"),
        ({"lockstep": {"data": {"class_names": "abc"}}}, "its data.class_names is a str .'abc'"),
        ({"extra": np.float64(1.0)}, "UnpicklingError"),
    ],
    ids=str,
)
def test_another_content_is_named(changes, says, tmp_path):
    torch.save({**whole(), **changes}, tmp_path / "x.ckpt")
    with pytest.raises(
        UserError, match=f"x.ckpt is not a checkpoint that can be loaded .*{says}"
    ) as raised:
        read_checkpoint(tmp_path / "x.ckpt")
    assert "\n" not in str(raised.value)
    assert re.search(r"[^.]\.$", str(raised.value))


@pytest.mark.parametrize("picture", [b"\x89PNG\r\n", b"\xff\xd8\xff\xe0JFIF", b"GIF89a", b"RIFF"])
def test_a_picture_is_told_to_be_no_checkpoint(picture, tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(picture + bytes(100))
    with pytest.raises(UserError, match="a.png .* not written by torch.save. Pass a .ckpt file"):
        read_checkpoint(path)


def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path):
    path = tmp_path / "x.ckpt"
    path.symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"x.ckpt cannot be read: Input/output error\."):
        read_checkpoint(path)


def test_a_damaged_file_is_one_sentence(tmp_path):
    path = tmp_path / "x.ckpt"
    with pytest.raises(UserError, match=r"There is no checkpoint .*x\.ckpt\."):
        read_checkpoint(path)
    torch.save(whole(), path)
    data = path.read_bytes()
    for damaged in (
        b"",
        data[:-100],
        data[:1000],
        b"x" * 1000,
        data[:40] + bytes(200) + data[240:],
    ):
        path.write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"x.ckpt is not a checkpoint that can be loaded safely.*[^.]\.$"
        ):
            read_checkpoint(path)
