"""What is composed from a command line, and the sentence where that cannot be."""

import pytest

from lockstep.config.compose import compose, plain
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
