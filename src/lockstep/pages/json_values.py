"""Reading values of which nothing is sure: a wrong type or a missing key gives nothing, never an error."""

from typing import Any

from lockstep.pages.curves import number


def mapping(value: Any) -> dict:
    return value if isinstance(value, dict) else {}


def finite(value: Any) -> float | None:
    """A number that is one, not a text, a truth value or infinity."""
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def numbers(value: Any) -> dict[str, float | None]:
    return {key: finite(item) for key, item in mapping(value).items()}


def items(value: Any) -> list:
    """A list as it is, nothing for None, and anything else as the only item."""
    if isinstance(value, list):
        return value
    return [] if value is None or value == "" else [value]


def is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, dict):
        return as_text(next(filter(None, (value.get(key) for key in ("name", "host", "message"))), None))
    if isinstance(value, list):
        return ", ".join(filter(None, map(as_text, value)))
    return str(value)


def first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def numeric_pair(pair: Any) -> tuple[list[float], list[float]]:
    """(x, y) of equal length with only finite numbers in both."""
    if not is_pair(pair) or not all(isinstance(side, list) for side in pair):
        return [], []
    x, y = pair
    if len(x) == len(y) and all_finite(x) and all_finite(y):  # what we wrote ourselves: no look at each value
        return x, y
    both = [(a, b) for a, b in zip(x, y, strict=False) if finite(a) is not None and finite(b) is not None]
    return [a for a, _ in both], [b for _, b in both]


def all_finite(values: list) -> bool:
    return set(map(type, values)) <= {int, float} and all(-1e18 < value < 1e18 for value in values)
