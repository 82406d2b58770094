"""A progress bar on a terminal, one line elsewhere."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def progress(what: str, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Gives advance(n); may be called from several threads."""
    if not sys.stderr.isatty():
        log.warning(what)
        yield lambda n: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    lock = threading.Lock()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total, completed=done)

        def advance(n: int) -> None:
            with lock:
                bar.advance(task, n)

        yield advance
