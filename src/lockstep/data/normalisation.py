"""Choose mean, deviation, crop and interpolation: from options, weights or the data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.process.errors import UserError

AUTO = "auto"


@dataclass(frozen=True)
class Normalisation:
    """The values that images are framed and normalised with.

    Args:
        mean, std: per channel, for pixels from 0 to 1.
        crop_pct: the share of the short side that is kept.
        interpolation: bilinear or bicubic.
        from_weights: the names of the values that come from the pretrained weights.
    """

    mean: list[float]
    std: list[float]
    crop_pct: float
    interpolation: str
    from_weights: tuple[str, ...]


def resolve_normalisation(
    options: Mapping[str, Any],
    data_statistics: Mapping[str, Any],
    weight_settings: Mapping[str, Any],
    channels: int,
) -> Normalisation:
    """Choose each value: from the option, from the pretrained weights, or from the data.

    Args:
        options: the values by name. None: take the value of the data. auto: take the value of the
            pretrained weights, or of the data if there are no weights.
        data_statistics: mean and std of the data.
        weight_settings: the values that the weights were trained with; {}: there are no weights.

    Raises:
        UserError: a value is invalid, or has another number of channels.
    """
    settings = {"crop_pct": 1.0, "interpolation": "bilinear", **data_statistics}
    for name, value in options.items():
        if value not in (None, AUTO):
            settings[name] = value

    from_weights = tuple(name for name in weight_settings if options[name] == AUTO)
    for name in from_weights:
        settings[name] = _adapt_value(name, weight_settings[name], channels)

    for name in ("mean", "std"):
        settings[name] = _repeat_per_channel(name, settings[name], channels)
    if min(settings["std"]) <= 0:
        raise UserError(f"data.std={settings['std']} must be positive.")
    return Normalisation(**settings, from_weights=from_weights)


def _adapt_value(name: str, value: Any, channels: int) -> Any:
    """Return a value of the weights that fits these images."""
    # The weights may be for colour images, and these images are grey.
    if name in ("mean", "std") and len(value) != channels:
        return float(np.mean(value))
    # timm gives volo a crop_pct of 1.15.
    if name == "crop_pct":
        return min(value, 1.0)
    return value


def _repeat_per_channel(name: str, value: Any, channels: int) -> list[float]:
    try:
        return np.broadcast_to(np.asarray(value, float), channels).tolist()
    except ValueError:
        raise UserError(
            f"data.{name}={value} must be auto, a number, or one for each of {channels} channels."
        ) from None
