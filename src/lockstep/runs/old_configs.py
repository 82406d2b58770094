"""Configs that earlier versions stored, in today's words: the one place that knows the old ones. Imports no torch."""

from typing import Any

OLD_TIMM = "models.timm_vit.TimmViT"  # had `timm_name`, and in `name` whatever should be shown
OLD_OPTION, OPTION = "timm_vit", "vit"
SMALL = "vit_tiny_32"


def today(config: dict[str, Any]) -> dict[str, Any]:
    """A config of a run folder or checkpoint, as this version would have composed it.

    Before `verbose` existed, the `name` of every model was for display alone.
    """
    model = config.get("model")
    if "verbose" in config or not isinstance(model, dict):
        return config
    found = {**config, "model": _model(model)}
    if isinstance(config.get("choices"), dict):
        choices = config["choices"]
        found["choices"] = {**choices, "model": OPTION if choices.get("model") == OLD_OPTION else choices.get("model")}
    if isinstance(config.get("overrides"), list):
        found["overrides"] = [word for given in config["overrides"] if (word := _word(given))]
    return found


def _model(old: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in old.items() if key not in ("name", "timm_name")}
    if old.get("_target_") != OLD_TIMM:
        return rest
    if old.get("name") == SMALL:
        return {**rest, "_target_": f"models.timm.{SMALL}"}
    return {**rest, "_target_": "models.timm.TimmModel", "name": old.get("timm_name", "vit_base_patch32_224")}


def _word(given: Any) -> Any:
    """An override of the command line; empty where it said what to show."""
    key, sign, value = str(given).partition("=")
    if key.lstrip("+") == "model.name":
        return ""
    if key == "model" and value == OLD_OPTION:
        return f"model={OPTION}"
    return f"{key.replace('model.timm_name', 'model.name')}{sign}{value}" if "timm_name" in key else given


def model_name(config: dict[str, Any]) -> str:
    """What is built, in records and on pages: timm's own name, or the option of the group."""
    model = config["model"]
    if model["_target_"] == "models.timm.TimmModel" and model.get("name"):
        return str(model["name"])
    return str((config.get("choices") or {}).get("model") or model["_target_"].rpartition(".")[2])
