"""A run that is killed or stopped at random moments ends with the weights of a run that nobody disturbed."""

import random
import signal
from functools import partial

import pytest

from faults import signal_at_step
from kills import DDP, FSDP, TINY, differences, disturbed_run, final_state
from lockstep.runs.folder import RunFolder
from runs import run_door


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "number"), [(DDP, signal.SIGKILL), (FSDP, signal.SIGTERM)])
def test_a_disturbed_run_ends_with_the_same_weights(tmp_path, strategy, number):
    reference = run_door("train", *strategy, *TINY, "run_id=reference", logs=tmp_path / "reference")
    assert reference.code == 0, reference.output
    command = [*strategy, *TINY, "run_id=r"]
    done, sent = disturbed_run(command, tmp_path / "r", random.Random(1), number, times=3, within_s=6.0)
    assert done.code == 0 and sent >= 1, done.output
    assert differences(final_state(reference.folder), final_state(done.folder)) == []


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [DDP, FSDP])
def test_checkpoints_written_beside_the_training_hold_the_same_bits_after_a_stop_and_a_resume(tmp_path, trainer):
    usual = [*trainer, *TINY, "trainer.max_epochs=2", "run_id=r"]
    assert run_door("train", *usual, logs=tmp_path / "usual").code == 0
    words, logs = [*usual, "callbacks.checkpoints.asynchronous=true"], tmp_path / "beside"
    stopped = run_door("train", *words, logs=logs, before=partial(signal_at_step, 5, signal.SIGTERM))
    assert stopped.code == 75, stopped.output
    done = run_door("train", *words, "resume=r", logs=logs)
    assert done.code == 0 and done.record["restarts"][0]["lost_steps"] == 0, done.output
    expected, beside = (final_state(RunFolder(tmp_path / name / "train/runs/r")) for name in ("usual", "beside"))
    assert differences(expected, beside) == [] and expected["global_step"] > 8
