"""Configs that earlier versions stored, in today's words: the one place that knows the old ones. Imports no torch."""

from typing import Any

from lockstep.runs.config import Config

OLD_TIMM = "models.timm_vit.TimmViT"  # had `timm_name`, and in `name` whatever should be shown
OLD_OPTION, OPTION = "timm_vit", "vit"
CLASSIFIER = "classifier.ImageClassifier"
SMALL = "vit_tiny_32"
IMAGE_FOLDER = "data.image_folder.ImageFolderDataModule"
CROP_FLIP = {
    "_target_": "lockstep.data.augmentation.CropFlip", "random_crop": True, "flip": None, "color_jitter": None,
    "erasing_prob": 0.0, "mixup_alpha": 0.0, "cutmix_alpha": 0.0, "mix_prob": 1.0, "switch_prob": 0.5,
    "mix_epochs": None,
}  # fmt: skip
# How images were made before `augmentation` was a group; `auto` did not exist.
OLD_IMAGES = {"mean": None, "std": None, "crop_pct": 1.0, "interpolation": "bilinear"}
WITH_DISPLAY_NAME = ("models.airbench.", "models.alexnet.", "models.small_cnn.")


# Keys that came later, with what runs before them did.
LATER: dict[str, Config] = {
    "data": {"fold": None, "num_folds": None, "stratify": False},
    "model": {"freeze": None},
    "optimizer": {"layer_decay": None, "head_lr_factor": 1.0, "decay_norms": True},
}

OLD_LOSS = {"_target_": "losses.cross_entropy.CrossEntropy", "class_weights": None}


def today(config: dict[str, Any]) -> dict[str, Any]:
    """A config of a run folder or checkpoint, as this version would have composed it."""
    found = _in_todays_words(config)
    there = {part: found.get(part) for part in LATER}
    older = {
        part: own
        for part, own in there.items()
        if isinstance(own, dict) and own and not LATER[part].keys() <= own.keys()
    }
    if "classifier" in found and "loss" not in found:
        found = {**found, "loss": {**OLD_LOSS, "label_smoothing": found["classifier"].get("label_smoothing", 0.0)}}
        found["metrics"] = {}
    return {**found, **{part: {**LATER[part], **own} for part, own in older.items()}} if older else found


def _in_todays_words(config: dict[str, Any]) -> dict[str, Any]:
    model = config.get("model")
    if not isinstance(model, dict):
        return config
    if "verbose" not in config and isinstance(config.get("classifier"), dict):  # keys that came later
        config = {"verbose": False, "quiet": False, **config}
        config["classifier"] = {"_target_": CLASSIFIER, **config["classifier"]}
    config = _with_augmentation(config)
    if "name" not in model:
        return config
    choices = config.get("choices")
    choices = choices if isinstance(choices, dict) else {}
    found = _model(model, choices.get("model"))
    if found == model:
        return config
    option = OPTION if choices.get("model") == OLD_OPTION else choices.get("model")
    words = config.get("overrides")
    words = [new for word in words if (new := _word(word))] if isinstance(words, list) else []
    return {**config, "model": found, "choices": {**choices, "model": option}, "overrides": words}


def _with_augmentation(config: dict[str, Any]) -> dict[str, Any]:
    """Squashed, bilinear, normalised by the data's own values: what is not said goes on as it was trained."""
    data = config.get("data")
    if "augmentation" in config or not isinstance(data, dict):
        return config
    old = {**OLD_IMAGES, **({"fit": "squash"} if data.get("_target_") == IMAGE_FOLDER else {})}
    words = config.get("overrides")
    words = words if isinstance(words, list) else []
    said = {str(word).partition("=")[0].lstrip("+") for word in words}
    added = [
        f"++data.{key}={'null' if value is None else value}" for key, value in old.items() if f"data.{key}" not in said
    ]
    choices = config.get("choices")
    return {
        **config,
        "data": {**old, **data},
        "augmentation": dict(CROP_FLIP),
        "choices": {**(choices if isinstance(choices, dict) else {}), "augmentation": "crop_flip"},
        "overrides": [*words, *added],
    }


def _model(old: dict[str, Any], option: str | None) -> dict[str, Any]:
    rest = {key: value for key, value in old.items() if key not in ("name", "timm_name")}
    if old.get("_target_") == OLD_TIMM:
        if old["name"] == SMALL:
            return {**rest, "_target_": f"models.timm.{SMALL}"}
        return {**rest, "_target_": "models.timm.TimmModel", "name": old.get("timm_name", "vit_base_patch32_224")}
    # Of a model of the user's own: what its yaml said for display, as the howto showed it.
    displayed = str(old.get("_target_")).startswith(WITH_DISPLAY_NAME) or old["name"] == option
    return rest if displayed else old


def _word(given: Any) -> Any:
    """An override of the command line; empty where it said what to show."""
    key, sign, value = str(given).partition("=")
    if key.lstrip("+") == "model.name":
        return ""
    if key == "model" and value == OLD_OPTION:
        return f"model={OPTION}"
    return f"{key.replace('model.timm_name', 'model.name')}{sign}{value}" if "timm_name" in key else given


def model_name(config: Config) -> str:
    """What is built, in records and on pages: timm's own name, or the option of the group."""
    model = config["model"]
    if model["_target_"] == "models.timm.TimmModel" and model.get("name"):
        return str(model["name"])
    return str((config.get("choices") or {}).get("model") or model["_target_"].rpartition(".")[2])


def data_name(config: Config) -> str:
    """Return data.name, or the option of the group where the data config has no name."""
    return str(config["data"].get("name") or (config.get("choices") or {}).get("data") or "data")
