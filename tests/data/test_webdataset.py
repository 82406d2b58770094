"""Tar shards: splits, labels of both kinds, samples that are not whole, shards that are cut off."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from data.webdataset import WebDatasetDataModule
from lockstep.process.errors import UserError
from sources import add

COLOURS = {"blue": (0, 0, 200), "green": (0, 200, 0), "red": (200, 0, 0)}


def png(label, i=0):
    out = io.BytesIO()
    Image.new("RGB", (12, 12), tuple(c + i for c in COLOURS[label])).save(out, "png")
    return out.getvalue()


def shard(path, count=8, label=lambda name: ("cls", name.encode()), members=None):
    """`count` samples of each class in turn, or the members given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = members or []
    for i in range(0 if members else count):
        for name in COLOURS:
            ending, data = label(name)
            found += [(f"{i}-{name}.png", png(name, i)), (f"{i}-{name}.{ending}", data)]
    with tarfile.open(path, "w") as tar:
        for name, data in found:
            add(tar, name, data)
    return path


def module(root, tmp_path, **options):
    options = {
        "image_size": 12,
        "global_batch_size": 6,
        "num_workers": 0,
        "test_fraction": 0.25,
        **options,
    }
    return WebDatasetDataModule(root=root, cache_dir=tmp_path / "cache", **options)


def facts(dm):
    dm.prepare()
    return dm.num_train, dm.num_val, dm.num_test


def test_names_of_files_or_folders_say_splits(tmp_path):
    for name, count in {
        "train/0.tar": 8,
        "train/1.tar": 6,
        "valid/0.tar": 2,
        "test/0.tar": 1,
    }.items():
        shard(tmp_path / "a" / name, count)
        shard(tmp_path / "b" / f"set-{name.replace('/', '-')}", count)
    for name in "ab":
        dm = module(tmp_path / name, tmp_path)
        assert facts(dm) == (42, 6, 3) and dm.class_names == ["blue", "green", "red"]
    for root in ("a/train/0.tar", "a/train"):
        assert sum(facts(module(tmp_path / root, tmp_path))) == (24 if "0" in root else 42)


def test_a_file_of_no_split_beside_others_is_left_out(tmp_path):
    for name in ("train-0", "validation-0", "extra-0"):
        shard(tmp_path / "a" / f"{name}.tar")
    dm = module(tmp_path / "a", tmp_path)
    assert facts(dm) == (24, 24, 24) and dm.left_out == {".tar files of no split": ["extra-0.tar"]}


def test_members_with_dots_and_capitals_are_read_and_others_counted(tmp_path):
    members = [(name, data) for i in range(5) for name, data in (
        (f"a.{i}.v2.png", png("red", i)), (f"a.{i}.v2.cls", b"red"),
        (f"b{i}.PNG", png("blue", i)), (f"b{i}.CLS", b"blue "),
        (f"c{i}.left.png", png("green", i)), (f"c{i}.cls", b"green"), (f"._b{i}.png", b"x"), (f"a.{i}.txt", b"x"),
    )]  # fmt: skip
    dm = module(shard(tmp_path / "0.tar", members=members), tmp_path, test_fraction=0.2)
    assert sum(facts(dm)) == 15 and dm.class_names == ["blue", "green", "red"]
    assert {reason: len(names) for reason, names in dm.left_out.items()} == {
        "hidden members": 5,
        ".txt members": 5,
    }


def npy(value):
    out = io.BytesIO()
    np.save(out, np.full((12, 12), value, np.uint16))
    return out.getvalue()


def test_numpy_arrays_are_read_in_full_depth(tmp_path):
    members = []
    for i in range(12):
        members += [(f"{i}.npy", npy(1000 + i)), (f"{i}.cls", b"dark" if i < 6 else b"light")]
    root = shard(tmp_path / "0.tar", members=members)
    dm = module(root, tmp_path, channels=1, mean=0, std=1, range=[1000, 1011])
    dm.attach_to_ranks()
    dm.test_on_all()
    batches = [dm.on_after_batch_transfer(batch, 0) for batch in dm.test_dataloader()]
    for images, labels in batches:
        assert ((images[:, 0, 0, 0] * 11).round() >= 6).tolist() == (labels == 1).tolist()
    assert sum(len(labels) for _, labels in batches) == 12


def test_numpy_arrays_beside_pictures_are_left_out(tmp_path):
    members = []
    for i in range(8):
        members += [(f"{i}.png", png("red", i)), (f"{i}.npy", npy(i)), (f"{i}.cls", b"red")]
    dm = module(shard(tmp_path / "0.tar", members=members), tmp_path, global_batch_size=2)
    dm.prepare()
    assert len(dm.source) == 8
    assert dm.left_out == {".npy members": [f"0.tar: {i}.npy" for i in range(8)]}


def test_labels_in_json(tmp_path):
    root = shard(
        tmp_path / "0.tar",
        label=lambda name: ("json", json.dumps({"kind": name, "x": [1]}).encode()),
    )
    dm = module(root, tmp_path, label_field="kind")
    dm.prepare()
    assert dm.class_names == list(COLOURS)
    for field, said in (
        (None, r"0.tar: 0-blue.png has no .cls file beside it.*data.label_field=FIELD"),
        ("none", r"0.tar: 0-blue.json holds no label \(KeyError: 'none'\)"),
        ("x", r"holds no label .ValueError: '\[1\]' is neither text nor a number"),
    ):
        with pytest.raises(UserError, match=said):
            module(root, tmp_path, label_field=field).prepare()


@pytest.mark.parametrize(
    ("said", "members"),
    [
        ("has no .cls file beside it", [("a.png", png("red"))]),
        ("a.cls holds no label", [("a.png", png("red")), ("a.cls", b"\xff")]),
        ("has no images .left out: 1 .txt members", [("a.txt", b"no image")]),
    ],
)
def test_a_sample_that_is_not_whole_is_named(said, members, tmp_path):
    with pytest.raises(UserError, match=said):
        module(shard(tmp_path / "0.tar", members=members), tmp_path).prepare()


def test_a_cut_off_shard_is_named(tmp_path):
    path = shard(tmp_path / "0.tar")
    dm = module(path, tmp_path, path="loader")
    dm.attach_to_ranks()
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(UserError, match="0.tar: .* is shorter than when it was listed"):
        list(dm.train_dataloader())
    with pytest.raises(UserError, match=f"{path} is cut off.*: repair or remove it"):
        module(path, tmp_path).prepare()


def test_two_images_of_one_label_are_refused(tmp_path):
    members = [("1.png", png("red")), ("1.mask.png", png("blue")), ("1.cls", b"red")]
    with pytest.raises(
        UserError, match="1.png and 1.mask.png have one label: keep one image for each key"
    ):
        module(shard(tmp_path / "x.tar", members=members), tmp_path).prepare()
