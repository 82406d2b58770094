"""Folders of images: splits, what is left out, groups, damage, and identical images."""

import os

import numpy as np
import pytest
from PIL import Image

from data.image_folder import ImageFolderDataModule
from lockstep.data.augmentation import CropFlip
from lockstep.data.listing import list_files
from lockstep.process.errors import UserError

RNG = np.random.default_rng(0)


def write(folder, counts):
    """counts: {class: images}, of odd sizes."""
    for name, n in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            image = Image.fromarray(
                RNG.integers(0, 256, (*RNG.integers(20, 60, 2), 3), dtype=np.uint8)
            )
            image.save(folder / name / f"{i}.{'jpg' if i % 2 else 'png'}")
    return folder


def module(tmp_path, root, stage="fit", augmentation=None, **options):
    options = {
        "image_size": 24,
        "global_batch_size": 4,
        "eval_batch_size": 5,
        "num_workers": 2,
        **options,
    }
    dm = ImageFolderDataModule(root=root, cache_dir=tmp_path / "cache", **options)
    dm.stage = stage
    dm.set_augmentation(augmentation)
    return dm


def prepared(tmp_path, root, **options):
    dm = module(tmp_path, root, **options)
    dm.prepare()
    return dm


@pytest.fixture
def root(tmp_path):
    return write(tmp_path / "images", {"cat": 30, "dog": 25})


def counts(dm):
    return dm.num_train, dm.num_val, dm.num_test


def names(dm, split):
    return [dm.source.name(i) for i in getattr(dm.splits, split)]


def test_classes_are_split_alike_under_every_seed(tmp_path, root):
    first, other = (prepared(tmp_path, root, test_fraction=0.2, seed=seed) for seed in (0, 1))
    assert counts(first) == (40, 4, 11) and first.class_names == ["cat", "dog"]
    assert first.counts_per_split == {"train": [22, 18], "val": [2, 2], "test": [6, 5]}
    assert sorted(names(first, "train") + names(first, "val") + names(first, "test")) == sorted(
        f"{path.parent.name}/{path.name}" for path in root.glob("*/*")
    )
    assert names(first, "test") == names(other, "test") and names(first, "val") != names(
        other, "val"
    )
    assert (
        first.data_hash == other.data_hash != prepared(tmp_path, root, test_fraction=0.3).data_hash
    )


def test_splits_of_folders_stay_and_test_may_lack_a_class(tmp_path):
    root = write(tmp_path / "set" / "train", {"a": 12, "b": 9}).parent
    write(root / "test", {"a": 3})
    assert counts(prepared(tmp_path, root, num_val=5)) == (16, 5, 3)
    write(root / "val", {"a": 2, "b": 1})
    assert counts(prepared(tmp_path, root, num_val=0)) == (21, 0, 3)  # val/ is not used
    dm = prepared(tmp_path, root, num_val=5)
    assert dm.counts_per_split == {"train": [12, 9], "val": [2, 1], "test": [3, 0]}
    write(root / "test", {"c": 3})
    with pytest.raises(UserError, match="the class c has no image to train on"):
        prepared(tmp_path, root)


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (
            ["cat/train", "cat/test", "dog/train", "dog/test"],
            "the splits lie within cat, dog: move cat/test to test/cat",
        ),
        (
            ["seen/cat", "seen/dog", "test/cat", "test/dog"],
            "test/ is a split and no folder beside it is named train",
        ),
    ],
)
def test_splits_that_are_not_clear_are_refused(folders, said, tmp_path):
    write(tmp_path, dict.fromkeys(folders, 4))
    with pytest.raises(UserError, match=said):
        prepared(tmp_path / "cache", tmp_path)


@pytest.mark.parametrize(
    "parts", [("Train", "valid", "TEST"), ("training", "dev", "testing"), ("train_images", "validationset", "Test "),
              ("train", "val_set", "test_images"), ("trainval", "val", "test")]
)  # fmt: skip
def test_splits_by_any_of_their_names(tmp_path, parts):
    for part, count in zip(parts, (6, 2, 3)):
        write(tmp_path / "set" / part, {"a": count, "b": count})
    dm = prepared(tmp_path, tmp_path / "set")
    assert (*counts(dm), dm.class_names) == (12, 4, 6, ["a", "b"])
    with pytest.raises(UserError, match="test, train hold no class folders"):
        prepared(tmp_path, write(tmp_path / "flat", {"train": 6, "test": 6}))
    dm = prepared(tmp_path, write(tmp_path / "things", {"test_tube": 6, "dev_board": 6}))
    assert dm.class_names == ["dev_board", "test_tube"]


def test_a_folder_around_the_splits_is_no_class(tmp_path):
    for part in ("train", "val"):
        write(tmp_path / "download" / "set" / part, {"a": 6, "b": 6})
    with pytest.raises(UserError, match="holds only set/ with train, val: add /set to data.root"):
        prepared(tmp_path, tmp_path / "download")


def test_a_folder_beside_train_that_is_no_split_is_named(tmp_path):
    write(tmp_path / "set" / "train", {"a": 6, "b": 6})
    write(tmp_path / "set" / "extra", {"a": 2})
    (tmp_path / "set" / "test").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "set" / "test" / "unlabelled.png")
    dm = prepared(tmp_path, tmp_path / "set", test_fraction=0.2)
    assert dm.num_test == 2 and dm.left_out == {
        "images in extra/, which is no split of class folders": ["extra/a/0.png", "extra/a/1.jpg"],
        "images in test/, which is no split of class folders": ["test/unlabelled.png"],
    }


def test_imagenets_layout_tests_on_val(tmp_path):
    write(tmp_path / "set" / "train", {"a": 6, "b": 6})
    write(tmp_path / "set" / "val", {"a": 2, "b": 3})
    dm = prepared(tmp_path, tmp_path / "set")
    assert (
        counts(dm) == (12, 5, 5)
        and dm.splits.note == "no test images: the validation images are tested"
    )
    write(tmp_path / "alone" / "test", {"a": 3, "b": 4})
    assert counts(prepared(tmp_path, tmp_path / "alone", stage="test")) == (0, 0, 7)
    with pytest.raises(UserError, match="has no images to train on"):
        prepared(tmp_path, tmp_path / "alone")


def test_hidden_and_system_folders_links_and_other_endings(tmp_path, root):
    for hidden in (".ipynb_checkpoints", "__MACOSX", "@eaDir", "cat/.thumbnails", "cat/@eaDir"):
        write(root / hidden, {"x": 1})
    for name in (
        "cat/._3.jpg",
        "dog/a.heic",
        "dog/b.HEIC",
        "dog/notes.txt",
        "dog/README",
        "stray.png",
    ):
        (root / name).write_bytes(b"x")
    write(tmp_path / "elsewhere", {"fox": 5})
    (root / "fox").symlink_to(tmp_path / "elsewhere" / "fox")
    (root / "dog" / "above").symlink_to(root)
    (root / "dog" / "self").symlink_to(root / "dog")
    (root / "loop").symlink_to(root)
    dm = prepared(tmp_path, root, path="loader")
    assert dm.class_names == ["cat", "dog", "fox"] and sum(counts(dm)) == 60
    assert {reason: len(names) for reason, names in dm.left_out.items()} == {
        "hidden images": 1, ".heic files": 2, ".txt files": 1, "nameless files": 1,
        "images outside of class folders": 1, "links to a folder above": 3,
    }  # fmt: skip
    assert "cat/._3.jpg" in dm.left_out["hidden images"]


def test_a_broken_link_and_a_pipe_are_named(tmp_path, root):
    for make in (lambda path: path.symlink_to(tmp_path / "nowhere"), os.mkfifo):
        make(root / "cat" / "x.png")
        with pytest.raises(
            UserError, match="cat/x.png cannot be read .a broken link or no regular file"
        ):
            prepared(tmp_path, root)
        (root / "cat" / "x.png").unlink()


def test_folders_and_options_that_cannot_be(tmp_path, root):
    with pytest.raises(UserError, match="data.root= is missing: give a folder"):
        module(tmp_path, None)
    with pytest.raises(UserError, match="nowhere does not exist"):
        prepared(tmp_path, tmp_path / "nowhere")
    with pytest.raises(UserError, match="0.png is a file: give a folder"):
        prepared(tmp_path, root / "cat" / "0.png")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no class folders"):
        prepared(tmp_path, tmp_path / "empty")
    (root / "bird").mkdir()
    (root / "bird" / "1.heic").write_bytes(b"x")
    with pytest.raises(UserError, match="bird holds no images .left out: 1 .heic files."):
        prepared(tmp_path, root)
    with pytest.raises(UserError, match="channels=0 must be 3"):
        module(tmp_path, root, channels=0)
    with pytest.raises(UserError, match="data.name='a/b' names a cache folder"):
        module(tmp_path, root, name="a/b")


@pytest.mark.parametrize("seed", range(5))
def test_every_class_keeps_an_image_to_train_on(tmp_path, seed):
    """Two classes of 60 images, twelve of 3, and one of a single image."""
    root = tmp_path / "images"
    for label, count in [
        ("large0", 60),
        ("large1", 60),
        *((f"small{i}", 3) for i in range(12)),
        ("solo", 1),
    ]:
        (root / label).mkdir(parents=True)
        for i in range(count):
            (root / label / f"{i}.png").write_bytes(b"%d" % i)
    dm = prepared(tmp_path, root, seed=seed, path="loader")
    train, test = dm.counts_per_split["train"], dm.counts_per_split["test"]
    assert (
        counts(dm) == (127, 14, 16)
        and min(train) >= 1
        and train[:2] == [48, 48]
        and test[:2] == [6, 6]
    )
    with pytest.raises(
        UserError,
        match="test_fraction=0.5 would draw 1 of 2 images, but a class has no second image",
    ):
        prepared(
            tmp_path,
            write(tmp_path / "two", {"a": 1, "b": 1}),
            test_fraction=0.5,
            global_batch_size=1,
        )


@pytest.mark.parametrize("options", [{"num_val": 8}, {"fold": 1, "num_folds": 4}])
def test_groups_stay_in_one_split(tmp_path, options):
    """Photographs of 30 patients, three to each."""
    for patient in range(30):
        for i in range(3):
            path = tmp_path / "images" / "ab"[patient % 2] / f"p{patient:02d}_{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (patient, i, 0)).save(path)
    dm = prepared(
        tmp_path,
        tmp_path / "images",
        group="(p0[0-9])_|(p[1-9][0-9])_",
        test_fraction=0.2,
        **options,
    )
    groups = [{name[2:5] for name in names(dm, split)} for split in ("train", "val", "test")]
    assert sum(map(len, groups)) == 30 == len(set.union(*groups)) and dm.num_test == 18
    assert 4 <= dm.num_val <= 24 and min(dm.class_counts) > 20
    with pytest.raises(UserError, match=r"data.group='x\[' is not a regular expression"):
        prepared(tmp_path, tmp_path / "images", group="x[")
    with pytest.raises(UserError, match="data.group='patient' does not match a/p00_0.png"):
        prepared(tmp_path, tmp_path / "images", group="patient")


def test_names_of_classes_are_ordered_as_of_torchvision(tmp_path):
    """A folder of pictures of trains is a class, and no split."""
    unreadable = os.fsdecode(b"\xff")
    root = write(
        tmp_path / "words", dict.fromkeys(["c10", "c9", "B", "caf\u0065\u0301", "train", "test"], 3)
    )
    (root / unreadable).mkdir()
    Image.new("RGB", (9, 9)).save(root / unreadable / "1.png")
    assert prepared(tmp_path, root).class_names == [
        "B",
        "\\xff",
        "c10",
        "c9",
        "caf\u00e9",
        "test",
        "train",
    ]


def test_augmenting_single_images_leaves_them_in_their_files(tmp_path, root):
    why = "single images are augmented, and an array would hold them resized to 24 px"
    assert prepared(tmp_path, root, augmentation=CropFlip(erasing_prob=0.1)).choose_path() == (
        "loader",
        why,
    )
    with pytest.raises(
        UserError, match=f"data.path=array is not possible: {why}. Set data.path=auto"
    ):
        prepared(tmp_path, root, augmentation=CropFlip(erasing_prob=0.1), path="array")


def test_names_with_leading_zeros_have_one_order_on_every_disk(tmp_path, monkeypatch):
    scandir = os.scandir
    orders = []
    for reverse in (False, True):
        for name in ("1", "01", "001"):
            (tmp_path / "a").mkdir(exist_ok=True)
            Image.new("RGB", (4, 4)).save(tmp_path / "a" / f"{name}.png")

        def in_order(path, reverse=reverse):
            return sorted(scandir(path), key=lambda entry: entry.name, reverse=reverse)

        monkeypatch.setattr(os, "scandir", in_order)
        orders.append([item.name for item in list_files(tmp_path, {})])
        monkeypatch.setattr(os, "scandir", scandir)
    assert orders[0] == orders[1] and len(orders[0]) == 3
