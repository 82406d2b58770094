"""CSV files: text that no spreadsheet takes for a formula, and damage that costs its own line only.

Imports no torch.
"""

from collections.abc import Iterator
from typing import IO, Any

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
MAX_LINE = 100_000  # characters; Python's reader takes 131,072 in a cell


def guarded(value: Any) -> Any:
    """A text that begins like a formula with an apostrophe before it; all else as it is."""
    if isinstance(value, str) and value.startswith(FORMULA_SIGNS) and not _is_number(value):
        return f"'{value}"
    return value


def unguarded(text: str) -> str:
    """The inverse of `guarded`."""
    return text[1:] if text.startswith("'") and text[1:].startswith(FORMULA_SIGNS) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def whole_lines(file: IO[str]) -> Iterator[str]:
    """The lines without those that are no row of ours: too long, or with a quote that would swallow the next.

    Args:
        file: opened with errors="replace".
    """
    for line in limited_lines(file):
        if line.count('"') % 2 == 0:
            yield line.replace("\0", "")


def limited_lines(file: IO[str]) -> Iterator[str]:
    """The lines of up to MAX_LINE characters; one without an end would fill the memory."""
    skipping = False
    while line := file.readline(MAX_LINE):
        ended = line.endswith("\n")
        if not skipping and (ended or len(line) < MAX_LINE):
            yield line
        skipping = not ended
