"""A sweep with against=baseline: its jobs, what is refused, and what the runs of a pair share."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lockstep.config.keys import is_omitted_by_baseline
from lockstep.process.errors import UserError
from lockstep.sweeps.against import choose_paired_sweeper, expand_arms, find_omitted_overrides


def parsed(*overrides):
    return OverridesParser.create().parse_overrides(list(overrides))


def test_each_seed_runs_with_and_without_the_recipes_overrides():
    jobs = expand_arms(
        parsed(
            "experiment=mine",
            "seed=1,2",
            "against=baseline",
            "augmentation=none,trivial_augment",
            "trainer.max_epochs=2",
            "~callbacks.hardware",
        )
    )
    end = ("trainer.max_epochs=2", "~callbacks.hardware")
    assert jobs == [
        ("experiment=mine", "seed=1", *end),
        ("experiment=mine", "seed=2", *end),
        ("experiment=mine", "seed=1", "augmentation=none", *end),
        ("experiment=mine", "seed=1", "augmentation=trivial_augment", *end),
        ("experiment=mine", "seed=2", "augmentation=none", *end),
        ("experiment=mine", "seed=2", "augmentation=trivial_augment", *end),
    ]


@pytest.mark.parametrize(
    ("overrides", "baseline"),
    [
        (["model=vit", "seed=1", "against=baseline", "loss=bce"], ("model=vit", "seed=1")),
        (["against=baseline", "seed=1", "loss=bce", "data=digits"], ("seed=1", "data=digits")),
        (["loss=bce", "seed=1", "against=baseline", "tags=[a]"], ("seed=1", "tags=[a]")),
    ],
)
def test_the_baseline_omits_what_follows_or_else_what_stands_before(overrides, baseline):
    assert expand_arms(parsed(*overrides))[0] == baseline


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("augmentation", True),
        ("model.dropout", True),
        ("data.image_size", True),
        ("trainer.ema_decay", True),
        ("data", False),
        ("data.root", False),
        ("data.num_folds", False),
        ("data.val_fraction", False),
        ("data.fold", False),
        ("experiment", False),
        ("task", False),
        ("task.label_smoothing", True),
        ("trainer.max_epochs", False),
        ("trainer.limit_train_batches", False),
        ("paths.log_dir", False),
        ("tags", False),
    ],
)
def test_the_baseline_omits_the_recipe_alone(key, expected):
    assert is_omitted_by_baseline(key) is expected


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["seed=1,2,3", "against=baseline"], "needs an override"),
        (["seed=1", "against=baseline", "loss=bce"], "seed=1,2,3"),
        (["seed=1,2", "against=other", "loss=bce"], "against=baseline"),
        (["seed=1,2", "against=baseline", "optimizer.lr=interval(0,1)"], "range"),
        (["seed=1,2", "against=baseline", "loss=bce", "hydra/sweeper=optuna"], "hydra/sweeper"),
    ],
)
def test_a_sweep_without_pairs_is_refused(overrides, reason):
    with pytest.raises(UserError, match=reason):
        choose_paired_sweeper(overrides, parsed(*overrides))


def test_the_paired_sweeper_alone_says_what_to_type():
    with pytest.raises(UserError, match="needs against=baseline.*seed=1,2,3 against=baseline"):
        choose_paired_sweeper(["seed=1,2"], parsed("seed=1,2"), "paired")


def test_the_paired_sweeper_may_be_typed_beside_against():
    overrides = ["hydra/sweeper=paired", "seed=1,2", "loss=bce", "against=baseline"]
    expected = ["seed=1,2", "loss=bce", "against=baseline", "hydra/sweeper=paired"]
    assert choose_paired_sweeper(overrides, parsed(*overrides), "paired") == expected


def test_options_of_hydra_are_of_no_arm():
    words = ["seed=1,2", "against=baseline", "loss=bce", "hydra/launcher=submitit_slurm"]
    assert find_omitted_overrides(words) == ["loss=bce"]


def test_only_against_changes_the_sweeper():
    overrides = ["seed=1,2", "loss=bce,focal"]
    assert choose_paired_sweeper(overrides, parsed(*overrides)) == overrides
    compared = ["seed=1,2", "loss=bce", "against=baseline"]
    assert choose_paired_sweeper(compared, parsed(*compared)) == [*compared, "hydra/sweeper=paired"]
