"""What every test has: the lines of a run on stdout, warnings and errors on stderr, as a script shows them."""

import os
import signal

import pytest

from lockstep.runs import signals
from lockstep.runs.output import set_up


def pytest_configure() -> None:
    """Each of several workers has a core of its own: threads that share cores spin while they wait for each other.

    A Ctrl-C counts, also where whoever started the tests ignores it, as a shell does for what it runs with `&`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    worker, cores = os.environ.get("PYTEST_XDIST_WORKER"), sorted(os.sched_getaffinity(0))
    if worker:
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture(autouse=True)
def console():
    set_up()


@pytest.fixture(autouse=True)
def environment_of_its_own():
    """Lightning's `deterministic=true` sets a variable of cuBLAS, which would cost the runs of later tests memory."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_signal_of_another_test():
    signals.asked.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A worker's report travels as UTF-8, and a test may have printed a file name that is none."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report
