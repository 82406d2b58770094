"""What a run says: Python's logging with one handler and one format, set up once by each script and each rank.

    log = logging.getLogger(__name__)     log.info("epoch 1/10 …")     log.warning("…")

Plain lines for what happens, on stdout; "warning: …" and "error: …" on stderr, in colour on a terminal.
Imports no torch.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[2]
COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m"}
END = "\033[0m"
# Control characters but for line ends and tabs, and those that turn the direction of writing
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class Console(logging.Handler):
    """Writes to today's stdout and stderr, whatever they are by then."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout if record.levelno < logging.WARNING else sys.stderr
        try:
            stream.write(encodable(line_of(record, in_colour=stream.isatty()), stream) + "\n")
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more: else Python would end with code 120
            _write_nowhere(stream)


def line_of(record: logging.LogRecord, *, in_colour: bool = False) -> str:
    text = printable(record.getMessage())
    if record.levelno < logging.WARNING:
        return text
    level = max(known for known in COLOURS if known <= record.levelno)
    word = f"{logging.getLevelName(level).lower()}:"
    return f"{COLOURS[level]}{word}{END} {text}" if in_colour else f"{word} {text}"


def printable(text: str) -> str:
    """Names and errors of others' files cannot move the cursor, colour the terminal or turn its text round."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def encodable(text: str, stream: Any) -> str:
    """What the stream cannot write as `\\xe9`: an ASCII terminal, a file name that is no text."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def say(text: object) -> None:
    """print() for what a script answers, whatever it names, and whoever has read enough of it (`… | head`)."""
    try:
        print(encodable(printable(str(text)), sys.stdout), flush=True)
    except BrokenPipeError:
        _write_nowhere(sys.stdout)


def set_up(*, verbose: bool = False, quiet: bool = False) -> None:
    """Show what this project's modules log, and the warnings of libraries.

    Args:
        verbose: our debugging lines too. Never those of libraries: botocore's hold signatures.
        quiet: warnings and errors only; wins over verbose.
    """
    for stream in (sys.stdout, sys.stderr):  # what print() cannot write must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
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
