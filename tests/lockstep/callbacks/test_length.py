"""Validation within an epoch, and a training that its time ends; resumed runs equal uninterrupted ones."""

import csv
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from faults import signal_at_step
from lockstep.storage.checkpoint_files import complete
from lockstep.storage.load import read_checkpoint
from runs import run_door

WORDS = ["experiment=quickstart", "trainer.max_epochs=2", "trainer.log_every_n_steps=4", "trainer.num_threads=1",
         "~callbacks.hardware", "run_id=r"]  # fmt: skip
WITHIN = ["trainer.val_check_interval=8", "trainer.accumulate_grad_batches=2"]  # of the 20 steps of an epoch
AT = ["8", "16", "20", "28", "36", "40"]


def weights(done, kind="last"):
    path, _ = next(complete(done.folder.checkpoints, kind))
    return read_checkpoint(path)["state_dict"]


def assert_equal(a, b):
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def validated(done):
    with done.folder.metrics.open(newline="") as file:
        return [(row["step"], row["val/loss"], row["val/acc"]) for row in csv.DictReader(file) if row["val/acc"]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    done = run_door("train", *WORDS, *WITHIN, logs=tmp_path_factory.mktemp("whole"))
    assert done.code == 0, done.output
    return done


def test_an_epoch_is_validated_every_so_many_optimizer_steps_and_at_its_end(whole):
    found = validated(whole)
    assert [step for step, *_ in found] == AT
    best = max(found, key=lambda row: float(row[2]))
    record = whole.record
    assert record["best_checkpoint"]["step"] == int(best[0]) and record["metrics"]["val/acc_best"] == float(best[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "hook", "phase"),
    [
        (8, "on_train_batch_end", "validation"),  # before the validation at step 8
        (2, "on_validation_batch_end", "validation"),  # in the one at step 16
    ],
)
def test_a_run_that_is_interrupted_within_an_epoch_goes_on_bit_for_bit(whole, tmp_path, stop, hook, phase):
    small = "data.eval_batch_size=100"  # several batches in a validation
    stopped = run_door("train", *WORDS, *WITHIN, small, logs=tmp_path, before=partial(signal_at_step, stop, hook=hook))
    assert stopped.code == 75, stopped.output
    [(path, _)] = complete(stopped.folder.checkpoints, "last")
    assert read_checkpoint(path)["lockstep"]["point"]["phase"] == phase
    done = run_door("train", "resume=r", logs=tmp_path)
    assert done.code == 0, done.output
    assert [step for step, *_ in validated(done)] == AT
    assert [row[2] for row in validated(done)] == [row[2] for row in validated(whole)]
    for kind in ("last", "best"):
        assert_equal(weights(done, kind), weights(whole, kind))
    assert done.record["metrics"]["test/correct"] == whole.record["metrics"]["test/correct"]


def a_second_a_step(stop_at: int | None = None):
    """A clock of training that every optimizer step moves on by a second, over all starts."""
    from lockstep.callbacks import interruption, run_recorder
    from lockstep.callbacks.resume_point import ends_step

    if stop_at:
        signal_at_step(stop_at)
    interruption.VOTE_INTERVAL_S = 0.02
    clock, original = [0.0], interruption.MaxTime.on_train_batch_end

    def tick(self, trainer, *given):
        clock[0] += ends_step(trainer)
        original(self, trainer, *given)

    interruption.MaxTime.on_train_batch_end = tick
    run_recorder.time = SimpleNamespace(monotonic=lambda: clock[0])


def test_time_ends_a_training_which_is_validated_tested_and_finished(tmp_path):
    words = [*WORDS, "trainer.check_val_every_n_epoch=5", "trainer.max_time=13s"]
    done = run_door("train", *words, logs=tmp_path, before=a_second_a_step)
    assert done.code == 0, done.output
    record, steps = done.record, done.record["steps"]
    assert steps == 13 and record["status"] == "finished" and record["ended_by"] == "max_time"
    assert record["best_checkpoint"]["step"] == steps and record["metrics"]["test/images"] == 360
    assert [step for step, *_ in validated(done)] == [str(steps)]
    assert "trainer.max_time: the limit of 13 s is reached at step 13, in epoch 1 of 2" in done.output


@pytest.mark.slow
def test_the_time_counts_over_restarts_and_more_of_it_goes_on_in_mid_epoch(whole, tmp_path):
    words = [*WORDS, "trainer.accumulate_grad_batches=2", "trainer.max_time=13s"]

    assert run_door("train", *words, logs=tmp_path, before=partial(a_second_a_step, stop_at=5)).code == 75
    done = run_door("train", "resume=r", logs=tmp_path, before=a_second_a_step)
    assert done.code == 0 and done.record["steps"] == 13 and len(done.record["restarts"]) == 1, done.output
    over = run_door("train", "resume=r", logs=tmp_path)
    assert over.code == 2 and "is finished" in over.output and "give more trainer.max_time" in over.output
    again = run_door("train", "resume=auto", "run_id=r", logs=tmp_path)
    assert again.code == 0 and "has finished" in again.output
    longer = run_door("train", "resume=r", "trainer.max_time=null", logs=tmp_path)
    assert longer.code == 0 and longer.record["steps"] == 40 and longer.record["ended_by"] is None, longer.output
    assert_equal(weights(longer), weights(whole))
