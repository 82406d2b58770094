"""What every test has: the lines of a run on stdout, warnings and errors on stderr, as a script
shows them.
"""

import gc
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lockstep.process import signals
from lockstep.process.output import configure_logging

# What users rely on, through the command line and public functions (CONTRIBUTING.md): make
# test-contract
CONTRACT = (
    "test_train.py", "test_kills.py", "test_eval.py", "test_torchrun.py",
    "test_two_hosts.py::test_two_hosts_lose_one_and_resume_to_equal_weights[one_command",
    "test_slurm.py::test_usr1", "test_slurm.py::test_a_killed", "test_slurm.py::test_each_job", "test_s3_runs.py",
    "test_run_pages.py", "test_export.py", "lockstep/strategies/test_checkpoints_across.py",
    "lockstep/data/test_same_pixels.py", "lockstep/data/test_batches.py", "lockstep/sweeps/test_optuna_search.py",
)  # fmt: skip

BEGAN_AT = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--minutes",
        type=float,
        help="begin no test later; each commit begins at another file (default: no limit)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(
            here
        ) and f"{item.path.relative_to(here)}::{item.name}".startswith(CONTRACT):
            item.add_marker("contract")
    if config.getoption("minutes"):
        begin_at_another_file(items)


def begin_at_another_file(items: list[pytest.Item]) -> None:
    """Begin at another file in each commit, so that none is left out by every commit."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, text=True, capture_output=True)
    files = list(dict.fromkeys(item.path for item in items))
    if done.returncode or not files:
        return
    first = files[int(done.stdout, 16) % len(files)]
    start = next(i for i, item in enumerate(items) if item.path == first)
    items[:] = items[start:] + items[:start]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("minutes")
    if minutes and time.monotonic() > item.config.stash[BEGAN_AT] + 60 * minutes:
        pytest.skip("no time is left of --minutes")


def pytest_collection_finish() -> None:
    gc.freeze()  # so that the tests need not look through the objects of torch, again and again


def pytest_configure(config: pytest.Config) -> None:
    """Each of several workers has a core of its own: threads that share cores spin while they wait
    for each other.

    Signals count, also where whoever started the tests ignores them, as a shell does with `&` and
    nohup.
    """
    config.stash[BEGAN_AT] = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    worker, cores = os.environ.get("PYTEST_XDIST_WORKER"), sorted(os.sched_getaffinity(0))
    if worker:
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(autouse=True)
def console():
    configure_logging()


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """Lightning's `deterministic=true` sets a variable of cuBLAS, which would cost the runs of
    later tests memory.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_signal_of_another_test():
    signals.received.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A worker's report travels as UTF-8, and a test may have printed a file name that is none."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections
    ]
    return report
