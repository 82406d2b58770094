"""A run from start to test, as a user starts it."""

import json
import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"


def test_a_run_trains_tests_and_leaves_its_page(tmp_path):
    paths = [f"paths.log_dir={tmp_path}", f"paths.data_dir={tmp_path}/data", f"paths.logbook_dir={tmp_path}/logbook"]
    command = [
        sys.executable,
        str(SRC / "train.py"),
        "experiment=quickstart",
        "trainer.max_epochs=4",
        "run_id=r",
        *paths,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "train/runs/r"
    record = json.loads((folder / "run.json").read_text())
    assert record["status"] == "finished" and record["metrics"]["test/acc"] > 0.7
    assert (folder / "page.md").exists() and list((folder / "checkpoints").glob("best-*.ckpt"))
