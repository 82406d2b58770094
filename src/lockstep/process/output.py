"""Show what is logged: plain lines on stdout, warnings and errors on stderr."""

import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import TextIO

from lockstep.process.errors import is_disk_full
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact_text

COLOURS = {"warning": "\033[33m", "error": "\033[31m"}
RESET = "\033[0m"
# Control characters but for line ends and tabs, marks that change the direction of writing, and
# lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Console(logging.Handler):
    """Write to the current stdout and stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        # As in every handler, a wrong call of log.warning must not end a training.
        try:
            text = escape_unprintable(self.format(record))
        except Exception:
            self.handleError(record)
            return
        if record.exc_info:
            # A traceback may quote a request with credentials.
            text = redact_text(text)
        if record.levelno < logging.WARNING:
            print_line(text, sys.stdout)
            return

        label = "error" if record.levelno >= logging.ERROR else "warning"
        if sys.stderr.isatty():
            print_line(f"{COLOURS[label]}{label}:{RESET} {text}", sys.stderr)
        else:
            print_line(f"{label}: {text}", sys.stderr)


def escape_unprintable(text: str) -> str:
    """Escape what could move the cursor or colour the terminal, as a file's name may."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_line(text: str, stream: TextIO, *, is_result: bool = False) -> None:
    """Print a line; a closed pipe (`… | head`) is not an error.

    Args:
        is_result: raise OSError if the disk is full.
    """
    try:
        print(text, file=stream, flush=True)
    except (OSError, ValueError) as error:
        # Python would end with exit code 120 when it flushes the stream at its end.
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), 1 if stream is sys.stdout else 2)
        if is_result and is_disk_full(error):
            raise


def print_result(text: object) -> None:
    """Print a result of a script."""
    print_line(escape_unprintable(str(text)), sys.stdout, is_result=True)


def configure_logging(*, verbose: bool = False, quiet: bool = False) -> None:
    """Show what Lockstep's and the user's modules log, and the warnings of libraries.

    `verbose` shows their debugging lines, too. Those of libraries stay hidden, because botocore's
    contain signatures.
    `quiet` shows warnings and errors only, and wins over verbose.
    """
    # A name that the terminal cannot write is escaped.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")

    root = logging.getLogger()
    if not any(isinstance(handler, Console) for handler in root.handlers):
        root.addHandler(Console())

    level = logging.DEBUG if verbose else logging.INFO
    if quiet:
        level = logging.WARNING
    modules_of_user = [path.stem for path in (REPOSITORY / "src").glob("*")]
    for name in ("__main__", "lockstep", *modules_of_user):
        logging.getLogger(name).setLevel(level)


def join_names(names: Sequence[str], limit: int) -> str:
    """Return "a, b, c, …": the first `limit` names, and … if there are more."""
    more = ["…"] if len(names) > limit else []
    return ", ".join([*names[:limit], *more])


def format_duration(seconds: float) -> str:
    """Return the two largest parts: 6.7 s, 48 s, 4 min 12 s, 3 h 7 min, 2 d 4 h."""
    if seconds < 1:
        return f"{seconds:.2g} s"
    if seconds < 9.95:
        return f"{round(seconds, 1):g} s"

    rest_s = round(seconds)
    parts = []
    for unit_s, unit in UNITS:
        count, rest_s = divmod(rest_s, unit_s)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])
