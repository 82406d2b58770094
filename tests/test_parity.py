"""`make parity` for the smallest model: every strategy equals one process, and every seeded fault is noticed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_strategy_equals_one_process_and_faults_are_noticed(tmp_path):
    command = [
        sys.executable,
        "benchmarks/parity.py",
        "--models",
        "small_cnn",
        "--out",
        str(tmp_path),
    ]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    results = json.loads((tmp_path / "results" / "parity.json").read_text())
    assert results["passed"] and len(results["rows"]) == 15 and len(results["faults"]) == 4
    for row in results["rows"]:
        assert max(row["difference"]["64-true"].values()) < 1e-12
        assert row["last_loss"] < 0.8 * row["first_loss"]
    assert all(max(fault["losses"], fault["weights"]) > 1e-3 for fault in results["faults"].values())
    assert "| small_cnn | fsdp_sim, 4 ranks |" in (tmp_path / "parity.md").read_text()
