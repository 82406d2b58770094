"""The composed config of a run: names in it, its differences from others, spans of time. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Any

from lockstep.process.errors import UserError

Config = Mapping[str, Any]
UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def model_name(config: Config) -> str:
    """Return what the model is called in records and on pages: timm's name, or the option of the group."""
    model = config["model"]
    if model["_target_"] == "models.timm.TimmModel" and model.get("name"):
        return str(model["name"])
    return str((config.get("choices") or {}).get("model") or model["_target_"].rpartition(".")[2])


def data_name(config: Config) -> str:
    """Return data.name, or the option of the group where the data config has no name."""
    return str(config["data"].get("name") or (config.get("choices") or {}).get("data") or "data")


def seconds_of(stated: Any, key: str) -> float:
    """Return the seconds of 5400, 90m, 1.5h, or days:hours:minutes:seconds, whose first parts are optional.

    The UserError for what is no span of time above 0 names the option `key`.
    """
    text, seconds = "" if isinstance(stated, bool) else str(stated).strip(), 0.0
    if number := re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([a-z]*)", text):
        seconds = float(number[1]) * UNITS.get(number[2], 0)
    elif re.fullmatch(r"\d+(:\d+){1,3}", text):
        parts = zip(reversed(text.split(":")), (1, 60, 3600, 86400), strict=False)
        seconds = float(sum(int(part) * unit for part, unit in parts))
    if not seconds:
        raise UserError(
            f"{key}={stated}: give days:hours:minutes:seconds as 00:01:30:00, a number with its unit as 90m or 1.5h, "
            "or seconds."
        )
    return seconds


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"trainer.devices": 2, …}; a list is one value."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    parts = (flatten(value, f"{prefix}.{key}".lstrip(".")) for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}
