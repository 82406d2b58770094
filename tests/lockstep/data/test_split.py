"""The split of a data set, and what its report says."""

import logging

import numpy as np
import pytest

from data.synthetic import SyntheticDataModule
from lockstep.data.report import collect_settings, log_contents
from lockstep.data.split import SplitRule
from lockstep.process.errors import UserError

LABELS = np.random.default_rng(0).choice(4, 103, p=[0.5, 0.3, 0.15, 0.05])


def assigned(seed=5, labels=LABELS[:93], given=None, groups=None, **options):
    """Of images to train and validate on; the test images lie behind them."""
    labels = np.append(labels, [0] * 10)
    given = np.repeat([0, 2], [len(labels) - 10, 10]) if given is None else given
    return SplitRule(seed, **options).assign(labels, given, groups)


def test_folds_are_disjoint_and_stratified():
    parts = [assigned(fold=fold, num_folds=4) for fold in range(4)]
    for part in parts:
        assert np.array_equal(np.sort(np.concatenate([part.train, part.val])), np.arange(93))
        assert part.test.tolist() == list(range(93, 103))
    assert np.array_equal(np.sort(np.concatenate([part.val for part in parts])), np.arange(93))
    counts = [np.bincount(LABELS[part.val], minlength=4) for part in parts]
    assert np.ptp(counts, axis=0).max() <= 1
    assert len(assigned(fold=92, num_folds=93).val) == 1


def test_draws_and_folds_follow_from_the_seed():
    for options in ({"fold": 1, "num_folds": 5}, {"num_val": 20}):
        one, again, other = (assigned(seed, **options).val for seed in (5, 5, 6))
        assert np.array_equal(one, again) and not np.array_equal(one, other)


@pytest.mark.parametrize("num_val", [1, 9, 40, 88])
def test_a_draw_is_stratified_and_leaves_an_image(num_val):
    part = assigned(num_val=num_val)
    of_class, drawn = np.bincount(LABELS[:93]), np.bincount(LABELS[part.val], minlength=4)
    assert len(part.val) == num_val and (np.abs(drawn - of_class * num_val / 93) < 1).all()
    assert np.bincount(LABELS[part.train], minlength=4).min() >= 1


@pytest.mark.parametrize("options", [{"num_val": 20}, {"fold": 0, "num_folds": 3}])
def test_groups_stay_together_and_leave_each_class_an_image(options):
    groups = np.append(np.arange(93) // 4, 100 + np.arange(10))
    for seed in range(10):
        part = assigned(seed, groups=groups, **options)
        assert not set(groups[part.val]) & set(groups[part.train])
        assert len(part.train) + len(part.val) == 93 and 12 <= len(part.val) <= 40
        assert "fold" in options or np.bincount(LABELS[part.train], minlength=4).min() >= 1


def test_divided_groups_and_too_few_groups_are_refused():
    with pytest.raises(
        UserError, match="data.group: 1 of 94 groups have images in several of train, val and test"
    ):
        assigned(groups=np.append(np.arange(93), [0] + [93] * 9))
    for options, said in (
        ({"num_val": 20}, "num_val=20 would draw 20 of 93 images, but a class has no second group"),
        ({"fold": 0, "num_folds": 5}, "data.num_folds=5 does not fit the 4 groups"),
    ):
        with pytest.raises(UserError, match=said):
            assigned(groups=np.append(LABELS[:93], [9] * 10), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fold": 0}, "data.fold=0 data.num_folds=None: give both"),
        ({"num_folds": 5}, "data.fold=None data.num_folds=5: give both"),
        ({"fold": 0, "num_folds": 1}, "data.num_folds=1: give both"),
        ({"fold": 5, "num_folds": 5}, "the fold from 0 to num_folds - 1"),
        ({"fold": "all", "num_folds": 5}, "data.fold=all"),
        (
            {"fold": 0, "num_folds": 94},
            "data.num_folds=94 of 93 images leaves 93 to train on and takes 0",
        ),
        ({"num_val": 93}, "num_val=93 of 93 images leaves 0 to train on and takes 93"),
        (
            {"val_fraction": 0.001},
            "val_fraction=0.001 of 93 images leaves 93 to train on and takes 0",
        ),
        (
            {"fold": 0, "num_folds": 2, "given": np.repeat([0, 1, 2], [50, 43, 10])},
            "data.fold=0: the data have valid",
        ),
    ],
)
def test_options_that_contradict_themselves(options, message):
    with pytest.raises(UserError, match=message):
        assigned(**options)


# What a run says of its images.

WANTED = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.5, "interpolation": "bicubic"}


def test_contents_and_what_the_weights_say_are_logged_and_recorded(tmp_path, caplog):
    dm = SyntheticDataModule(
        cache_dir=tmp_path, image_size=8, num_images=64, num_test_images=9, global_batch_size=8, mean="auto", std=0.18,
        path="loader",
    )  # fmt: skip
    dm.set_augmentation(None, WANTED)
    dm.prepare()
    with caplog.at_level(logging.INFO):
        log_contents(dm, "none")
    names = ", ".join(f"pattern {number}" for number in range(10))
    assert [record.message for record in caplog.records] == [
        f"data: 10 classes: {names} · 58 images to train, 6 to validate, 9 to test",
        "images: loader, as data.path=loader · augmentation=none · mean 0.5, 0.5, 0.5 · std 0.18, 0.18, 0.18 · "
        "the weights say mean, crop_pct, interpolation",
    ]
    assert collect_settings(dm, "none") == {
        "path": "loader", "why": "data.path=loader", "augmentation": "none", "mean": [0.5] * 3, "std": [0.18] * 3,
        "crop_pct": 0.5, "interpolation": "bicubic", "resize": 16, "fit": "crop",
        "from_weights": ["mean", "crop_pct", "interpolation"],
    }  # fmt: skip
