"""Ctrl-C and SIGTERM from a script's first line to its last: who asked, and how a process ends that saves nothing.

Before a run begins either ends the process, without a traceback: with exit code 130 or 143. Within it the first asks
for an end and a second Ctrl-C ends at once. Handlers replace KeyboardInterrupt altogether: raised in the middle of an
import, torch would catch it. Imports next to nothing: until this file is imported, Python's own handler counts.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False  # as typing has it, whose import takes as long as all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

INTERRUPTED_AT_ONCE = 128 + signal.SIGINT
RETRY_S = 0.05

asked: list[int] = []  # the signals that came since the run began
_before_the_end: list[Callable[[], None]] = []  # what a second Ctrl-C still does


def end_on_signal() -> None:
    """From now on Ctrl-C and SIGTERM end this process; one that is to be ignored (nohup, `&`) stays so."""
    _before_the_end.clear()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _frame: Any) -> NoReturn:
    os._exit(128 + number)


def remember_signals(*numbers: int) -> None:
    """From now on these are only noted in `asked`, for whoever takes over; a second Ctrl-C ends at once."""
    for number in numbers:
        signal.signal(number, lambda number, _frame: note(number))


def note(number: int) -> None:
    """In a handler: remember it; the second Ctrl-C ends this process here."""
    if number == signal.SIGINT and signal.SIGINT in asked:
        end_at_once()
    asked.append(number)


def at_the_end(words: Callable[[], None]) -> None:
    """Called before a second Ctrl-C ends the process: a line in the record."""
    _before_the_end.append(words)


def end_at_once() -> NoReturn:
    try:
        for words in _before_the_end:
            words()
    finally:
        os._exit(INTERRUPTED_AT_ONCE)


def take_over() -> str | None:
    """The name of the signal that came before the caller's own handlers, if any; nothing raises it any more."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    return signal.Signals(asked[0]).name if asked else None


def raise_on_signal(error: type[Exception], *numbers: int) -> None:
    """From now on the first of these is raised as error(name); one that was noted before is raised here.

    In the middle of an import it waits for the import's end: torch takes a half-imported module for a missing one.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGALRM:
            note(number)
            if len(asked) > 1:
                return  # it has been raised, or waits
        if _importing(frame):
            # Again and again: one that comes just before a wait begins is not heard until the wait ends.
            signal.setitimer(signal.ITIMER_REAL, RETRY_S, RETRY_S)
            return
        raise error(take_over())

    for number in (*numbers, signal.SIGALRM):
        signal.signal(number, stop)
    if asked:
        raise error(take_over())


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
