"""Which training images validate."""

import numpy as np
import pytest

from data.image_folder import ImageFolderDataModule
from data.synthetic import SyntheticDataModule
from lockstep.data.split import Split
from lockstep.runs.errors import UserError

LABELS = np.random.default_rng(0).choice(4, 103, p=[0.5, 0.3, 0.15, 0.05])


def test_folds_share_no_image_and_together_are_all_of_them():
    parts = [Split(5, fold=fold, num_folds=4).of(LABELS) for fold in range(4)]
    for train, val in parts:
        assert np.array_equal(np.sort(np.concatenate([train, val])), np.arange(103))
        assert np.all(np.diff(train) > 0) and np.all(np.diff(val) > 0)
    assert np.array_equal(np.sort(np.concatenate([val for _, val in parts])), np.arange(103))
    assert sorted(len(val) for _, val in parts) == [25, 26, 26, 26]


def test_every_fold_has_its_share_of_each_class():
    counts = [np.bincount(LABELS[Split(5, fold=fold, num_folds=4).of(LABELS)[1]], minlength=4) for fold in range(4)]
    assert np.ptp(counts, axis=0).max() <= 1


def test_folds_follow_from_the_seed():
    one, again, other = (Split(seed, fold=1, num_folds=5).of(LABELS)[1] for seed in (5, 5, 6))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_each_image_can_be_a_fold():
    assert [len(Split(5, fold=102, num_folds=103).of(LABELS)[part]) for part in (0, 1)] == [102, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold": 0}, "data.fold and data.num_folds go together"),
        ({"num_folds": 5}, "data.fold and data.num_folds go together"),
        ({"fold": 0, "num_folds": 1}, "data.num_folds=1: give a whole number from 2 on"),
        ({"fold": 0, "num_folds": 2.5}, "data.num_folds=2.5: give a whole number"),
        ({"fold": 5, "num_folds": 5}, "data.fold=5: with data.num_folds=5 give a whole number from 0 to 4"),
        ({"fold": -1, "num_folds": 5}, "data.fold=-1"),
        ({"fold": "all", "num_folds": 5}, "data.fold=all"),
        ({"fold": 0, "num_folds": 104}, "data.num_folds=104, and there are 103 images.*at most 103"),
        ({"fold": 0, "num_folds": 5, "num_val": 20}, "num_val=20 and data.fold=0 both say.*data.num_val=null"),
        ({"fold": 0, "num_folds": 5, "num_val": 0}, "num_val=0 and data.fold=0 both say"),
        ({"fold": 0, "num_folds": 5, "val_fraction": 0}, "val_fraction=0 and data.fold=0 both.*data.val_fraction=0.1"),
    ],
)
def test_folds_that_are_none_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Split(5, **options).of(LABELS)


def test_a_data_module_folds_its_training_images_and_leaves_the_test(tmp_path):
    def made(**options):
        own = {"num_images": 220, "num_test_images": 40, "num_classes": 3, "image_size": 8, "cache_dir": tmp_path}
        data = SyntheticDataModule(**own, **options)
        data.prepare()
        return data

    plain, folds = made(), [made(fold=fold, num_folds=5) for fold in range(5)]
    assert {data.num_val for data in folds} == {44} and {data.num_train for data in folds} == {176}
    assert {data.data_hash for data in (plain, *folds)} == {plain.data_hash}
    assert all(np.array_equal(data._test_index, plain._test_index) for data in folds)
    assert set(np.concatenate([data._val_index for data in folds]).tolist()) == set(range(220))


def photographs(root, per_class):
    from PIL import Image

    for name, count in per_class.items():
        (root / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8), (number, 90 * len(name), 0)).save(root / name / f"{number}.png")


def test_of_a_folder_whose_test_images_are_drawn_none_is_folded(tmp_path):
    photographs(tmp_path / "own", {"a": 40, "bb": 12})
    data = ImageFolderDataModule(
        root=tmp_path / "own", image_size=8, cache_dir=tmp_path / "cache", global_batch_size=4, fold=2, num_folds=3
    )
    data.prepare()
    assert not set(data._val_index) & set(data._test_index) and not set(data._train_index) & set(data._test_index)
    drawn = np.delete(np.arange(52), data._test_index)
    assert np.array_equal(np.sort(np.concatenate([data._train_index, data._val_index])), drawn)
    of_class = np.bincount(data._labels[drawn]) / 3
    assert np.all(np.abs(np.bincount(data._labels[data._val_index]) - of_class) < 1)


def test_data_with_validation_images_of_their_own_are_not_folded(tmp_path):
    for part in ("train", "val", "test"):
        photographs(tmp_path / "own" / part, {"a": 4, "bb": 4})
    data = ImageFolderDataModule(
        root=tmp_path / "own", image_size=8, cache_dir=tmp_path / "cache", global_batch_size=4, fold=0, num_folds=2
    )
    with pytest.raises(UserError, match="image_folder has validation images of its own"):
        data.prepare()
