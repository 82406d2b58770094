"""What is composed from a command line, and the sentence where that cannot be."""

import pytest
import yaml

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.launch.plan import chosen_how
from lockstep.runs.errors import UserError


@pytest.mark.parametrize("word", ["+=adadelta", "=3", "++=x", "~", "", " = 1"])
def test_an_override_without_a_key_is_named(word):
    with pytest.raises(UserError, match="names no key: write key=value"):
        compose("train", [word])


def test_an_override_counts():
    assert compose("train", ["optimizer.lr=0.5"]).optimizer.lr == 0.5


@pytest.mark.parametrize(
    ("words", "more", "checkpoints"),
    [
        ([], [], True),
        (["callbacks=spot"], ["spot"], True),
        (["callbacks=[default,spot]"], ["spot"], True),
        (["callbacks=default"], [], True),
        (["callbacks=none"], [], False),
        (["callbacks=[none,spot]"], ["spot"], False),
        (["~callbacks.checkpoints", "callbacks=spot"], ["spot"], False),
    ],
)
def test_callbacks_are_added_to_those_of_every_run(words, more, checkpoints):
    config = plain(compose("train", words))
    callbacks = config["callbacks"]
    every_run = ["checkpoints", "progress", "throughput", "hardware"]
    assert [name for name in callbacks if name not in every_run] == more
    assert bool(callbacks.get("checkpoints")) == checkpoints
    assert chosen_how(config) == ("" if checkpoints else " · WITHOUT CHECKPOINTS")


def test_a_value_of_a_callback_of_every_run_counts_beside_others():
    words = ["callbacks=spot", "callbacks.checkpoints.monitor=val/loss", "callbacks.spot.interval_s=1"]
    callbacks = plain(compose("train", words))["callbacks"]
    assert callbacks["checkpoints"]["monitor"] == "val/loss" and callbacks["spot"]["interval_s"] == 1


def test_loggers_are_added_likewise_and_csv_leaves_tensorboard_out():
    def chosen(*words):
        return [name for name, node in plain(compose("train", [*words]))["logger"].items() if node]

    assert chosen() == ["csv", "tensorboard"]
    assert chosen("logger=wandb") == ["csv", "tensorboard", "wandb"] == chosen("logger=[default,wandb]")
    assert chosen("logger=csv") == ["csv"]


def test_hydra_leaves_logging_alone():
    """Its own "disabled" would take our handler away, and a sweep would say nothing."""
    hydra = compose("train", []).hydra
    assert hydra.job_logging.root is None and hydra.hydra_logging.root is None


def test_without_a_word_it_is_the_assignments_recipe():
    bare, recipe = compose("train", []), compose("train", ["experiment=vit_ddp"])
    assert (bare.hydra.runtime.choices.model, bare.hydra.runtime.choices.data) == ("vit", "cifar10")
    ours, theirs = plain(bare), plain(recipe)
    ddp = plain(compose("train", ["trainer=ddp"]))["trainer"]
    of_recipe = {"experiment_name": "vit_ddp", "logbook": "keep", "trainer": ddp}
    assert (ours["data"].pop("mean"), theirs["data"].pop("mean")) == ("auto", 0.5), "as the weights say: 0.5"
    assert (ours["data"].pop("std"), theirs["data"].pop("std")) == ("auto", 0.5)
    assert {**ours, **of_recipe} == theirs
    assert ours["data"]["image_size"] == 224 and ours["trainer"]["accelerator"] == "auto"


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["data=digits", "model=small_cnn"], "data.image_size", 8),
        (["data=digits", "model=small_cnn"], "trainer.max_epochs", 10),
        (["data=cifar10", "model=airbench"], "data.image_size", 32),
        (["data=cifar10", "model=airbench"], "optimizer.lr", 1e-3),
        (["optimizer=sgd"], "optimizer.lr", 0.1),
        (["optimizer=sgd"], "data.image_size", 224),
        (["scheduler=none"], "scheduler", None),
        (["scheduler=linear"], "scheduler.warmup_epochs", 0.0),
        (["optimizer.lr=0.5", "trainer.max_epochs=2"], "optimizer.lr", 0.5),
        (["scheduler.warmup_epochs=0.5", "data.mean=[0.1,0.2,0.3]"], "scheduler.warmup_epochs", 0.5),
    ],
)
def test_what_fits_two_options_is_gone_with_either(words, key, value):
    found = plain(compose("train", words))
    for part in key.split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize("path", sorted((CONFIGS / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_leaves_no_part_of_its_recipe_to_the_defaults(path):
    stated = set()
    while path:
        listed = yaml.safe_load(path.read_text())["defaults"]
        stated |= {key.removeprefix("override /") for entry in listed if isinstance(entry, dict) for key in entry}
        parent = next((entry for entry in listed if isinstance(entry, str)), None)
        path = parent and path.with_name(f"{parent}.yaml")
    assert stated >= {"data", "model", "optimizer", "scheduler"}
