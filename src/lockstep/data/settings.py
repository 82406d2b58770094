"""Mean, deviation, crop and interpolation: as stated, as the pretrained weights want them, or the data's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.runs.errors import UserError

AUTO = "auto"
NEUTRAL = {"crop_pct": 1.0, "interpolation": "bilinear"}


@dataclass(frozen=True)
class ImageSettings:
    """
    Args:
        mean, std: per channel, for pixels from 0 to 1.
        crop_pct: share of the resized side that evaluation shows.
        interpolation: bilinear or bicubic.
        from_weights: the names of the values that the pretrained weights gave.
        against_weights: the names of the values that are stated otherwise than the weights want.
    """

    mean: list[float]
    std: list[float]
    crop_pct: float
    interpolation: str
    from_weights: tuple[str, ...] = ()
    against_weights: tuple[str, ...] = ()


def settle(
    stated: Mapping[str, Any], own: Mapping[str, Any], wanted: Mapping[str, Any], channels: int
) -> ImageSettings:
    """Return the values to use.

    Args:
        stated: a value by name; None: the data's own; auto: the weights', else the data's own.
        own: mean and std of the data.
        wanted: what the pretrained weights want; {} without.
    Raises:
        UserError: a value is invalid, or has another number of channels.
    """
    # Weights that were trained on another number of channels: their mean for each.
    theirs = {key: _fitted(value, channels) if key in ("mean", "std") else value for key, value in wanted.items()}
    default = {**NEUTRAL, **own}
    used: dict[str, Any] = {}
    for key, value in stated.items():
        used[key] = theirs.get(key, default[key]) if value == AUTO else default[key] if value is None else value
    for key in ("mean", "std"):
        if isinstance(used[key], str):
            raise UserError(f"data.{key}={used[key]} must be auto, a number, or one for each of {channels} channels.")
        values = [float(value) for value in np.atleast_1d(used[key])]
        if len(values) not in (1, channels):
            raise UserError(
                f"data.{key}={values} has {len(values)} values for {channels} channels: give 1 or {channels}."
            )
        used[key] = values * channels if len(values) == 1 else values
    if min(used["std"]) <= 0:
        raise UserError(f"data.std={used['std']} must be positive.")
    if isinstance(used["crop_pct"], str):
        raise UserError(f"data.crop_pct={used['crop_pct']} must be auto or a number above 0 and at most 1.")
    return ImageSettings(
        **used,
        from_weights=tuple(key for key in theirs if stated[key] == AUTO),
        against_weights=tuple(key for key in theirs if not _same(used[key], theirs[key])),
    )


def _fitted(values: Sequence[float], channels: int) -> list[float]:
    return list(values) if len(values) == channels else [float(np.mean(values))] * channels


def _same(used: Any, wanted: Any) -> bool:
    if isinstance(used, list):
        return all(math.isclose(a, b, abs_tol=0.01) for a, b in zip(used, wanted, strict=True))
    return bool(used == wanted)
