"""A span of time as a user writes it, and as a reader expects it."""

import math
import re
from typing import Any

from lockstep.runs.errors import UserError

UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
CLOCK = (86400, 3600, 60, 1)  # seconds of days:hours:minutes:seconds


def seconds_of(stated: Any, key: str) -> float:
    """Return the seconds of 5400, 90m, 1.5h, or days:hours:minutes:seconds, whose first parts are optional.

    Args:
        key: the option that states it.
    Raises:
        UserError: it is no span of time, or none above 0.
    """
    text, seconds = "" if isinstance(stated, bool) else str(stated).strip(), 0.0
    if number := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]*)", text):
        seconds = float(number[1]) * UNITS.get(number[2], 0)
    elif re.fullmatch(r"\d+(:\d+){1,3}", text):
        parts = map(int, reversed(text.split(":")))
        seconds = float(sum(part * unit for part, unit in zip(parts, reversed(CLOCK), strict=False)))
    if not 0 < seconds < math.inf:
        raise UserError(
            f"{key}={stated}: give days:hours:minutes:seconds as 00:01:30:00, a number with its unit as 90m or 1.5h, "
            "or seconds."
        )
    return seconds


def duration(seconds: float) -> str:
    """Return the two largest parts: 6.7 s, 48 s, 4 min 12 s, 3 h 7 min, 2 d 4 h."""
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{round(seconds, 1):g} s"
    left, words = round(seconds), []
    for size, unit in zip(CLOCK, ("d", "h", "min", "s"), strict=True):
        count, left = divmod(left, size)
        words += [f"{count} {unit}"] if count else []
    return " ".join(words[:2])
