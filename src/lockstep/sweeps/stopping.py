"""Stop a sweep: its jobs save first."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lockstep.process import signals
from lockstep.process.environment import environment
from lockstep.process.errors import EXIT_INTERRUPTED

KILLED_BY_CTRL_C = 128 + signal.SIGINT

running_jobs: set[Any] = set()  # the processes of jobs
stop_signals: list[int] = []  # signals that asked the sweep to stop


@contextmanager
def forward_stop_signals() -> Iterator[None]:
    """Pass a signal on to the running jobs, wait until they have saved, and end the sweep.

    A second Ctrl-C kills them. SLURM with cgroups signals only this process. A job that submitit
    runs does not end here, because it still has to return its result.
    """
    stop_signals.clear()
    previous = signals.install_stop_handler(_stop_jobs)
    try:
        yield
    finally:
        signals.restore_handlers(previous)

    requeue = previous.get(signal.SIGUSR1)
    if signal.SIGUSR1 in stop_signals and callable(requeue):
        # It is submitit's handler, which puts the job into the queue again, now that it has saved.
        requeue(signal.SIGUSR1, None)
    if stop_signals and "SUBMITIT_EXECUTOR" not in environment():
        was_killed = stop_signals.count(signal.SIGINT) > 1
        raise SystemExit(KILLED_BY_CTRL_C if was_killed else EXIT_INTERRUPTED)


def _stop_jobs(signal_number: int, _frame: Any) -> None:
    is_second_ctrl_c = signal_number == signal.SIGINT and signal.SIGINT in stop_signals
    stop_signals.append(signal_number)
    if is_second_ctrl_c:
        # The terminal has sent Ctrl-C to the jobs as well: let them print their messages.
        time.sleep(0.5)
        forwarded = signal.SIGKILL
    elif signal_number == signal.SIGINT:
        forwarded = signal.SIGTERM
    else:
        forwarded = signal.Signals(signal_number)
    for process in list(running_jobs):
        process.send_signal(forwarded)
