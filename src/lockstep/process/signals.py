"""Handle SIGTERM, SIGUSR1 (SLURM), SIGHUP (a lost ssh session) and Ctrl-C, which ask a run to save
and end.

Before training they end it at once, as a second Ctrl-C always does. Imports no torch.
"""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.process.errors import Interrupted

INTERRUPTED_AT_ONCE = 128 + signal.SIGINT
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

received: list[int] = []  # the signals that came since the run began
_force_exit_action: list[Callable[[], None]] = []


def install_stop_handler(handler: Callable[[int, Any], Any] | signal.Handlers) -> dict[int, Any]:
    """Install a handler for the signals that are not ignored, and return the earlier handlers.

    nohup ignores SIGHUP, and `&` in a script ignores Ctrl-C.
    """
    previous = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[int(number)] = signal.signal(number, handler)
    return previous


def restore_handlers(previous: dict[int, Any]) -> None:
    """Install the handlers that `install_stop_handler` has returned."""
    for number, handler in previous.items():
        signal.signal(number, handler)


def record_signal(number: int, _frame: Any = None) -> None:
    """Record a signal; the second Ctrl-C ends this process here."""
    if number == signal.SIGINT and signal.SIGINT in received:
        try:
            for action in _force_exit_action:
                action()
        finally:
            os._exit(INTERRUPTED_AT_ONCE)
    received.append(number)


def interrupt(number: int, _frame: Any = None) -> None:
    """Raise Interrupted for the first signal.

    In the middle of an import the exception may be lost: see `raise_if_received`.
    """
    record_signal(number)
    if len(received) == 1:
        raise_if_received()


def raise_if_received() -> None:
    """Raise Interrupted if a signal came, also one whose exception an import has caught."""
    if received:
        raise Interrupted(first_signal_name())


def first_signal_name() -> str:
    """Return the name of the first signal that came."""
    return signal.Signals(received[0]).name


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Only record the signals that come within the block; raise Interrupted after it if one came.

    A second Ctrl-C ends this process at once all the same.
    """
    previous = install_stop_handler(record_signal)
    try:
        yield
    finally:
        restore_handlers(previous)
    raise_if_received()


def set_force_exit_action(action: Callable[[], None]) -> None:
    """Set what a second Ctrl-C calls before it ends the process, to complete the record."""
    _force_exit_action[:] = [action]
