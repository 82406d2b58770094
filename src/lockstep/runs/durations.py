"""A span of time as a user writes it, and in words."""

import math
import re
from typing import Any

from lockstep.runs.errors import UserError

UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
CLOCK = (86400, 3600, 60, 1)  # seconds of days:hours:minutes:seconds


def seconds_of(stated: Any, key: str) -> float:
    """Of 5400, 90m, 1.5h, or days:hours:minutes:seconds, whose first parts may be left out.

    Args:
        key: what the user has given it for.
    Raises:
        UserError: it is no span of time, or none above 0.
    """
    seconds = _seconds(str(stated).strip()) if not isinstance(stated, bool) else 0.0
    if not 0 < seconds < math.inf:
        raise UserError(
            f"{key}={stated}: give days:hours:minutes:seconds as 00:01:30:00, a number with its unit as 90m or 1.5h, "
            "or seconds."
        )
    return seconds


def _seconds(text: str) -> float:
    if number := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]*)", text):
        return float(number[1]) * UNITS.get(number[2], 0)
    parts = text.split(":")
    if not 2 <= len(parts) <= 4 or not all(re.fullmatch(r"\d+", part) for part in parts):
        return 0.0
    return float(sum(int(part) * unit for part, unit in zip(reversed(parts), reversed(CLOCK), strict=False)))


def in_words(seconds: float) -> str:
    """48 s, 4 min 12 s, 3 h 7 min, 2 d 4 h: its two largest parts."""
    left, words = round(seconds), []
    for size, unit in zip(CLOCK, ("d", "h", "min", "s"), strict=True):
        count, left = divmod(left, size)
        words += [f"{count} {unit}"] if count else []
    return " ".join(words[:2]) or f"{seconds:g} s"
