"""A rank of a training on GPUs that comes to harm is named, with host and phase, and nobody waits for ever."""

import subprocess
import sys
import time

import pytest

from null_gpus import needs_null_gpus, run_on_null_gpus
from null_runs import FLOAT32, SMALL

pytestmark = [needs_null_gpus, pytest.mark.slow]
TIMEOUT_S = 8
FAULTS = {
    "dies": "killed by SIGKILL",
    "hangs": "the others have waited for it for",
    "runs_out_of_memory": "CUDA out of memory",
    "NULLGPU_NCCL": "connection closed by remote peer",
    "NULLGPU_LOST": "unspecified launch failure",
}


def harmed(how, logs, trainer="ddp", *more):
    """A run in which rank 1 comes to harm at its third step; seconds from then to its end."""
    flag = logs / "flag"
    environment = {how: f"1:{flag}"} if how.isupper() else {}
    function = "goes_on" if environment else how
    callback = f"+callbacks.harm={{_target_: rank_faults.Harmed, how: {function}, flag: {flag}}}"
    words = [*SMALL, FLOAT32, f"trainer={trainer}", f"trainer.timeout_s={TIMEOUT_S}", "run_id=r", callback, *more]
    done = run_on_null_gpus("train", *words, logs=logs, devices=2, environment=environment)
    return done, time.monotonic() - float(flag.read_text())


@pytest.mark.parametrize("trainer", ["ddp", "fsdp"])
@pytest.mark.parametrize("how", FAULTS)
def test_the_rank_that_came_to_harm_is_named(how, trainer, tmp_path):
    done, seconds = harmed(how, tmp_path, trainer)
    error = done.record["error"]
    assert done.code == 1 and (error["rank"], bool(error["host"])) == (1, True), done.output
    assert FAULTS[how] in error["message"] and error["phase"] == "training", error
    assert f"rank 1 on {error['host']}, in {error['phase']}: " in done.output
    assert seconds < TIMEOUT_S + 10, seconds
    assert ("trainer.accumulate_grad_batches=2" in done.output) == (how == "runs_out_of_memory")
    if how == "hangs":
        assert "rank_faults.py" in error["message"] and "in hangs" in error["message"]


def test_the_flight_recorder_of_each_rank_shows_who_did_not_come(tmp_path):
    done, _ = harmed("hangs", tmp_path)
    tool = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    command = [*tool, str(done.folder.path), "--prefix", "nccl-trace-rank"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Not all ranks joining collective" in shown.stderr and "missing ranks: {1}" in shown.stderr, shown
