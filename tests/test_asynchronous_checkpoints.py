"""Checkpoints that are written beside the training hold the bits of those that are not, also after a stop."""

import signal
from functools import partial

import pytest

from faults import signal_at_step
from kills import DDP, FSDP, TINY, differences, final_state
from lockstep.runs.folder import RunFolder
from runs import run_door

WORDS = [*TINY, "trainer.max_epochs=2", "run_id=r"]
ASYNCHRONOUS = "callbacks.checkpoints.asynchronous=true"


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [DDP, FSDP])
def test_the_same_bits_after_a_stop_and_a_resume(tmp_path, trainer):
    assert run_door("train", *trainer, *WORDS, logs=tmp_path / "usual").code == 0
    words, logs = [*trainer, *WORDS, ASYNCHRONOUS], tmp_path / "beside"
    stopped = run_door("train", *words, logs=logs, before=partial(signal_at_step, 5, signal.SIGTERM))
    assert stopped.code == 75, stopped.output
    done = run_door("train", *words, "resume=r", logs=logs)
    assert done.code == 0 and done.record["restarts"][0]["lost_steps"] == 0, done.output
    usual, beside = (final_state(RunFolder(tmp_path / name / "train/runs/r")) for name in ("usual", "beside"))
    assert differences(usual, beside) == [] and usual["global_step"] > 8
