"""A progress bar on a terminal, one line elsewhere."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def progress(what: str, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Yield advance(n), which several threads may call."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        log.info(what)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda n: bar.advance(task, n)
