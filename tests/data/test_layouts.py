"""Folders that can be read in two ways: splits or classes, one folder too high, names alike."""

import logging

import pytest
from PIL import Image

from data.image_folder import ImageFolderDataModule
from lockstep.data.report import log_contents
from lockstep.process.errors import UserError
from runs import run_script


def write(root, folders, count=5):
    for folder in folders:
        (root / folder).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(root / folder / f"{i}.png")
    return root


def prepared(tmp_path, root, **options):
    options = {"image_size": 8, "global_batch_size": 2, "num_workers": 0, **options}
    dm = ImageFolderDataModule(root=root, cache_dir=tmp_path / "cache", **options)
    dm.prepare()
    return dm


def within(parts, classes):
    return [f"{part}/{label}" for part in parts for label in classes]


UNUSUAL = within(["training_images", "tuning_images", "testing_images"], ["cat", "dog"])


def test_splits_of_unusual_names_are_no_classes(tmp_path):
    root = write(tmp_path / "set", UNUSUAL)
    with pytest.raises(UserError, match="each hold the folders cat, dog.*data.splits=false"):
        prepared(tmp_path, root)
    dm = prepared(tmp_path, root, splits=False)
    assert dm.class_names == ["testing_images", "training_images", "tuning_images"]


@pytest.mark.parametrize("part", ["training_images", "tuning_images"])
def test_a_split_that_lacks_a_class_is_no_class(part, tmp_path):
    root = write(tmp_path / "set", [*UNUSUAL, f"{part}/owl"])
    with pytest.raises(UserError, match="each hold the folders cat, dog.*data.splits=false"):
        prepared(tmp_path, root)


@pytest.mark.parametrize("other", ["unsorted", "extra/fox"])
def test_a_folder_beside_splits_makes_them_no_classes(other, tmp_path):
    parts = within(["train_images", "test_images"], ["cat", "dog"])
    root = write(tmp_path / "set", [*parts, other])
    with pytest.raises(UserError, match="test_images, train_images each hold the folders cat, dog"):
        prepared(tmp_path, root)
    assert len(prepared(tmp_path, root, splits=False).class_names) == 3


def test_the_same_folders_in_all_classes_are_reported(tmp_path):
    dm = prepared(tmp_path, write(tmp_path / "set", within(["fox", "owl"], ["day", "night"])))
    assert dm.class_names == ["fox", "owl"]
    assert "data.splits=false" in dm.warnings[0]
    assert not prepared(tmp_path, tmp_path / "set", splits=False).warnings


def test_one_folder_in_each_class_is_no_sign_of_splits(tmp_path):
    """Tiny ImageNet has the images of each class in <class>/images/."""
    dm = prepared(tmp_path, write(tmp_path / "set", within(["n01", "n02"], ["images"])))
    assert dm.class_names == ["n01", "n02"] and not dm.warnings


def test_a_root_that_is_one_folder_too_high_is_refused(tmp_path):
    root = write(tmp_path / "set", within(["photos"], ["cat", "dog"]))
    with pytest.raises(UserError, match=f"a single class, photos/.*give data.root={root}/photos"):
        prepared(tmp_path, root)
    assert prepared(tmp_path, root, splits=False).class_names == ["photos"]


def test_a_single_class_ends_a_run_before_training(tmp_path):
    root = write(tmp_path / "set", ["photos"], 12)
    words = ["data=image_folder", f"data.root={root}", "data.image_size=8", "model=small_cnn",
             "data.global_batch_size=4", "trainer=cpu", "run_id=r"]  # fmt: skip
    done = run_script("train", *words, logs=tmp_path / "logs")
    assert done.code == 2 and "single class" in done.output and "data.root=" in done.output


def test_train_beside_other_classes_is_a_class(tmp_path):
    root = write(tmp_path / "set", ["bus/city", "car/suv", "train/steam", "train/fast"])
    dm = prepared(tmp_path, root)
    assert dm.class_names == ["bus", "car", "train"] and len(dm.splits.split_ids) == 20
    assert "data.splits=true" in dm.warnings[0]
    assert prepared(tmp_path, root, splits=True).class_names == ["fast", "steam"]


@pytest.mark.parametrize(
    "folders",
    [
        ["train/steam", "train/fast", "car/suv"],
        ["train/steam", "train/fast", "car", "bus"],
        within(["bus", "car", "train"], ["day1", "day2"]),
    ],
)
def test_a_train_folder_of_unclear_meaning_is_refused(folders, tmp_path):
    root = write(tmp_path / "set", folders)
    with pytest.raises(UserError, match="data.splits=true .* or data.splits=false"):
        prepared(tmp_path, root)
    assert "train" in prepared(tmp_path, root, splits=False).class_names


def test_train_is_the_split_beside_more_of_its_classes(tmp_path):
    root = write(tmp_path / "set", ["train/cat", "train/dog", "extra/cat", "unsorted"], 8)
    dm = prepared(tmp_path, root)
    assert dm.class_names == ["cat", "dog"] and not dm.warnings


@pytest.mark.parametrize("folders", [["cat", "dog"], ["test_tube", "dev_board"]])
def test_splits_that_are_asked_for_must_be_there(folders, tmp_path):
    with pytest.raises(UserError, match="data.splits=true, but .* no folder train/"):
        prepared(tmp_path, write(tmp_path / "set", folders), splits=True)


def test_another_choice_of_splits_is_refused(tmp_path):
    with pytest.raises(UserError, match="data.splits=maybe must be one of auto, true, false"):
        prepared(tmp_path, tmp_path / "set", splits="maybe")


def test_classes_that_differ_in_case_alone_are_reported(tmp_path, caplog):
    dm = prepared(tmp_path, write(tmp_path / "set", ["Dog", "dog", "hot dog", "cat"]))
    with caplog.at_level(logging.INFO):
        log_contents(dm)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "Dog and dog differ in case" in warnings[0]


def test_classes_that_differ_in_blanks_alone_are_one_and_reported(tmp_path):
    dm = prepared(tmp_path, write(tmp_path / "set", ["cat", "dog", "dog "]))
    assert dm.class_names == ["cat", "dog"] and dm.counts_per_split["train"] == [4, 8]
    assert len(dm.warnings) == 1 and "'dog' and 'dog ' differ in blanks" in dm.warnings[0]


def test_groups_are_named_in_the_log_and_the_record(tmp_path):
    from lockstep.data.report import make_report

    root = write(tmp_path / "set", [f"{c}/p{i}" for c in ("cat", "dog") for i in range(10)], 2)
    fields = make_report(prepared(tmp_path, root, group="(p[0-9])")).fields
    assert fields["groups"].startswith("(p[0-9]): 10 groups, ")
