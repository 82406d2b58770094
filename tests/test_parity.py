"""`make parity` for the smallest model: every strategy equals one process, and every seeded fault is noticed."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_strategy_equals_one_process_and_faults_are_noticed(tmp_path):
    command = [sys.executable, "benchmarks/parity.py", "--models", "small_cnn", "--out", str(tmp_path / "parity.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "parity.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith("| small_cnn ")]
    assert len(rows) == 15 and rows[6][1] == "fsdp_sim, 4 ranks"
    assert max(float(value) for row in rows for value in row[3:5]) < 1e-12
    faults = [line.split(" | ") for line in lines if line.endswith(" | yes |")]
    assert len(faults) == 4 and all(max(map(float, row[1:3])) > 1e-3 for row in faults)
