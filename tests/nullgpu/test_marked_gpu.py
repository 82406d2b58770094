"""The tests that are marked `gpu` pass on two null GPUs."""

import subprocess
import sys

import pytest

from null_gpus import TESTS, needs_null_gpus, null_gpus

FILES = (
    "lockstep/strategies/test_gpu.py",
    "lockstep/strategies/test_data_parallel.py",
)


@needs_null_gpus
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FILES)
def test_marked_tests_pass(name):
    command = [sys.executable, "-m", "pytest", str(TESTS / name), "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env=null_gpus(devices=2), cwd=TESTS.parent, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout


def test_every_file_with_a_marked_test_is_named():
    marked = {
        str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()
    }
    assert marked - {"nullgpu/test_marked_gpu.py"} == set(FILES)
