"""A stopped run of a user's own LightningDataModule ends as a run without a stop."""

import csv
import signal
from functools import partial

import pytest

from faults import signal_at_step
from kills import differences, weights
from runs import run_script, succeed

STEPS = {"cpu": 10, "ddp_sim": 5}  # optimizer steps an epoch
OWN = [
    "task._target_=plain_task.NoisyRegression",
    "data._target_=plain_task.NoisyNumbers",
    "callbacks.checkpoints.monitor=val_loss",
    "callbacks.checkpoints.mode=min",
    "callbacks.checkpoints.every_minutes=0",
    "trainer.num_threads=1",
    "trainer.log_every_n_steps=2",
    "trainer.timeout_s=60",
    "~callbacks.hardware",
    "test=false",
    "run_id=r",
]


def train(logs, trainer, *words, **options):
    return run_script("train", *OWN, f"trainer={trainer}", *words, logs=logs, **options)


def losses(done):
    """Return the loss of each log point, over all starts of a run."""
    with done.folder.metrics.open(newline="") as file:
        return {row["step"]: row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]}


def assert_goes_on_as(whole, logs, *words):
    resumed = succeed("train", "resume=r", *words, logs=logs)
    assert differences(weights(resumed.folder), weights(whole.folder)) == []
    # A kill may lose a row of metrics.csv.
    assert losses(resumed).items() <= losses(whole).items()
    last = max(map(int, losses(whole)))
    assert str(last) in losses(resumed)


def test_a_run_resumed_with_more_epochs_equals_a_longer_one(tmp_path):
    whole = train(tmp_path / "whole", "cpu", "trainer.max_epochs=4")
    short = train(tmp_path / "r", "cpu", "trainer.max_epochs=2")
    assert (whole.code, short.code) == (0, 0), whole.output + short.output
    assert_goes_on_as(whole, tmp_path / "r", "trainer.max_epochs=4")


# Steps are shares of an epoch.
STOPS = {
    "killed_after_an_epoch": (signal.SIGKILL, "on_train_batch_end", 1.2),
    "killed_in_mid_epoch": (signal.SIGKILL, "on_train_batch_end", 1.8),
    "stopped_in_training": (signal.SIGTERM, "on_train_batch_end", 1.4),
    "stopped_in_validation": (signal.SIGTERM, "on_validation_batch_end", None),
}


@pytest.fixture(scope="module", params=["cpu-0", "cpu-2", "ddp_sim-0", "ddp_sim-2"])
def whole(request, tmp_path_factory):
    """A run without a stop, and what it was started with: one or two ranks, 0 or 2 workers."""
    trainer, _, num_workers = request.param.partition("-")
    words = [f"data.num_workers={num_workers}", "trainer.max_epochs=3"]
    done = train(tmp_path_factory.mktemp("whole"), trainer, *words)
    assert done.code == 0, done.output
    return trainer, words, done


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_a_run_stopped_anywhere_ends_with_the_same_weights(name, whole, tmp_path):
    trainer, words, done = whole
    number, hook, share = STOPS[name]
    # The second validation batch is in the first or second epoch.
    step = 2 if share is None else round(share * STEPS[trainer])
    fault = partial(signal_at_step, step, number=number, hook=hook)
    stopped = train(tmp_path, trainer, *words, before=fault)
    assert stopped.code != 0, stopped.output
    assert_goes_on_as(done, tmp_path)
