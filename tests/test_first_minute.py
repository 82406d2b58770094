"""What a newcomer types first, as they type it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_a_reader_that_has_enough_sees_no_traceback():
    read, write = os.pipe()
    os.close(read)  # before anything is written: what `| head` comes to
    with os.fdopen(write) as closed:
        done = subprocess.run(
            [sys.executable, "src/train.py", "--help"], cwd=ROOT, stdout=closed, stderr=subprocess.PIPE, text=True
        )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("script", [["src/train.py"], ["src/eval.py"], ["src/find_batch_size.py"], ["-m", "src.train"]])
def test_without_the_environment_the_line_that_works_is_said(script):
    # -S: no site-packages, so neither Hydra nor yaml
    command = [sys.executable, "-S", *script, "experiment=quickstart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "make install, then .venv/bin/python" in done.stderr, done.stderr
