"""A run that is killed or stopped at random moments ends with the weights of a run that nobody disturbed."""

import random
import signal

import pytest

from kills import DDP, FSDP, TINY, differences, disturbed_run, final_state
from runs import run_door


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "number"), [(DDP, signal.SIGKILL), (FSDP, signal.SIGTERM)])
def test_a_disturbed_run_ends_with_the_same_weights(tmp_path, strategy, number):
    reference = run_door("train", *strategy, *TINY, "run_id=reference", logs=tmp_path / "reference")
    assert reference.code == 0, reference.output
    command = [*strategy, *TINY, "run_id=r"]
    done, sent = disturbed_run(command, tmp_path / "r", random.Random(1), number, times=4, within_s=8.0)
    assert done.code == 0 and sent >= 1, done.output
    assert differences(final_state(reference.folder), final_state(done.folder)) == []
