"""Read the composed config of a run: names, spans of time, its flat form. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Any

from lockstep.process.errors import UserError

Config = Mapping[str, Any]
ABSENT = object()
SECONDS_OF_UNIT = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
# The seconds of each part of days:hours:minutes:seconds, beginning with the last part.
SECONDS_OF_PART = (1, 60, 3600, 86400)


def model_name(config: Config) -> str:
    """Return the model's name in records: timm's name, or the option of the group."""
    model = config["model"]
    if model["_target_"] == "models.timm.TimmModel" and model.get("name"):
        return str(model["name"])
    choices = config.get("choices") or {}
    return str(choices.get("model") or model["_target_"].rpartition(".")[2])


def data_name(config: Config) -> str:
    """Return data.name, or the option of the group if the data config has no name."""
    choices = config.get("choices") or {}
    return str(config["data"].get("name") or choices.get("data") or "data")


def parse_seconds(span: Any, key: str) -> float:
    """Return the seconds of a span of time.

    Args:
        span: 5400, 90m, 1.5h, or days:hours:minutes:seconds. Its first parts may be left out.
        key: the option with this value, for the error.

    Raises:
        UserError: it is no span of time above 0.
    """
    text = "" if isinstance(span, bool) else str(span).strip()
    seconds = 0.0
    if number := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]*)", text):
        seconds = float(number[1]) * SECONDS_OF_UNIT.get(number[2], 0)
    elif re.fullmatch(r"\d+(:\d+){1,3}", text):
        for part, unit in zip(reversed(text.split(":")), SECONDS_OF_PART, strict=False):
            seconds += int(part) * unit
    if not seconds:
        raise UserError(
            f"{key}={span}: give days:hours:minutes:seconds as 00:01:30:00, a number with its unit "
            "as 90m or 1.5h, or seconds."
        )
    return seconds


def lookup(tree: Any, key: str) -> Any:
    """Return the value at a dotted key, or ABSENT."""
    for name in key.split("."):
        if not isinstance(tree, Mapping) or name not in tree:
            return ABSENT
        tree = tree[name]
    return tree


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"trainer.devices": 2, …}; a list is one value."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}".lstrip("."))
    return flat
