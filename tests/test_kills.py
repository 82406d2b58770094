"""Killed and stopped runs end with the weights of an undisturbed one, and every strategy with those
of one process.
"""

import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from faults import signal_at_step
from kills import DDP, FSDP, TINY, differences, final_state, run_with_signals
from lockstep.records.folder import RunFolder
from runs import run_script

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "number"), [(DDP, signal.SIGKILL), (FSDP, signal.SIGTERM)])
def test_a_disturbed_run_ends_with_the_same_weights(tmp_path, strategy, number):
    reference = run_script(
        "train", *strategy, *TINY, "run_id=reference", logs=tmp_path / "reference"
    )
    assert reference.code == 0, reference.output
    command = [*strategy, *TINY, "run_id=r"]
    done, sent = run_with_signals(
        command, tmp_path / "r", random.Random(1), [number], times=3, within_s=6.0
    )
    assert done.code == 0 and sent >= 1, done.output
    assert differences(final_state(reference.folder), final_state(done.folder)) == []


@pytest.mark.slow
@pytest.mark.parametrize("trainer", [DDP, FSDP])
def test_asynchronous_checkpoints_hold_the_same_bits_after_a_resume(tmp_path, trainer):
    usual = [*trainer, *TINY, "trainer.max_epochs=2", "run_id=r"]
    assert run_script("train", *usual, logs=tmp_path / "usual").code == 0
    words, logs = [*usual, "callbacks.checkpoints.asynchronous=true"], tmp_path / "beside"
    stopped = run_script(
        "train", *words, logs=logs, before=partial(signal_at_step, 5, signal.SIGTERM)
    )
    assert stopped.code == 75, stopped.output
    done = run_script("train", *words, "resume=r", logs=logs)
    assert done.code == 0 and done.record["restarts"][0]["lost_steps"] == 0, done.output
    expected, beside = (
        final_state(RunFolder(tmp_path / name / "train/runs/r")) for name in ("usual", "beside")
    )
    assert differences(expected, beside) == [] and expected["global_step"] > 8


# `make parity` for the smallest model: every strategy equals one process, and every seeded fault is
# noticed.


@pytest.mark.slow
def test_every_strategy_equals_one_process_and_faults_are_noticed(tmp_path):
    command = [
        sys.executable,
        "benchmarks/parity.py",
        "--models",
        "small_cnn",
        "--out",
        str(tmp_path / "parity.md"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "parity.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| small_cnn ")]
    assert len(rows) == 16 and rows[6][1] == "fsdp_sim, 4 ranks"
    assert max(float(value) for row in rows for value in row[3:5]) < 1e-12
    faults = [line.split(" | ") for line in lines if line.endswith(" | yes |")]
    assert len(faults) == 4 and all(max(map(float, row[1:3])) > 1e-3 for row in faults)
