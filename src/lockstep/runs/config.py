"""The composed config of a run, and what its model and data are called."""

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def model_name(config: Config) -> str:
    """Return what the model is called in records and on pages: timm's name, or the option of the group."""
    model = config["model"]
    if model["_target_"] == "models.timm.TimmModel" and model.get("name"):
        return str(model["name"])
    return str((config.get("choices") or {}).get("model") or model["_target_"].rpartition(".")[2])


def data_name(config: Config) -> str:
    """Return data.name, or the option of the group where the data config has no name."""
    return str(config["data"].get("name") or (config.get("choices") or {}).get("data") or "data")
