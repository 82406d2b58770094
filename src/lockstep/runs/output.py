"""What a run says: Python's logging with one handler and one format, set up once by each script and each rank.

    log = logging.getLogger(__name__)     log.info("epoch 1/10 …")     log.warning("…")

Plain lines for what happens, on stdout; "warning: …" and "error: …" on stderr, in colour on a terminal.
Imports no torch.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SRC = Path(__file__).resolve().parents[2]
COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
END = "\033[0m"


class Console(logging.Handler):
    """Writes to today's stdout and stderr, whatever they are by then."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout if record.levelno < logging.WARNING else sys.stderr
        try:
            stream.write(line_of(record, in_colour=stream.isatty()) + "\n")
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more: else Python would end with code 120
            _write_nowhere(stream)


def line_of(record: logging.LogRecord, *, in_colour: bool = False) -> str:
    text = record.getMessage()
    if record.levelno < logging.WARNING:
        return text
    level = max(known for known in COLOURS if known <= record.levelno)
    word = f"{logging.getLevelName(level).lower()}:"
    return f"{COLOURS[level]}{word}{END} {text}" if in_colour else f"{word} {text}"


def set_up(*, verbose: bool = False, quiet: bool = False) -> None:
    """Show what this project's modules log, and the warnings of libraries.

    Args:
        verbose: our debugging lines too. Never those of libraries: botocore's hold signatures.
        quiet: warnings and errors only; wins over verbose.
    """
    root = logging.getLogger()
    if not any(isinstance(handler, Console) for handler in root.handlers):
        root.addHandler(Console())
    level = logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO
    for name in ("__main__", *(path.stem for path in SRC.iterdir())):
        logging.getLogger(name).setLevel(level)


@contextmanager
def only_warnings(name: str) -> Iterator[None]:
    """What loggers under `name` have to say is said by another process of this machine already."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def _write_nowhere(stream: object) -> None:
    number = 1 if stream is sys.stdout else 2
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), number)
