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
        mean: per channel, of pixels from 0 to 1.
        std: likewise.
        crop_pct: share of the resized side that evaluation shows.
        interpolation: bilinear or bicubic.
        from_weights: which of these the pretrained weights have said.
        against_weights: which of them are stated otherwise than the weights want.
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
    """
    Args:
        stated: by key a value, None (the data's own) or auto (the weights', else the data's own).
        own: mean and std of the data.
        wanted: what the pretrained weights want, as far as they say; {} without.
    Raises:
        UserError: a value that is none, or as many as there are no channels.
    """
    own = {**NEUTRAL, **own}
    used = {
        key: wanted.get(key, own[key]) if value == AUTO else own[key] if value is None else value
        for key, value in stated.items()
    }
    for key in ("mean", "std"):
        is_theirs = stated[key] == AUTO and key in wanted
        used[key] = _fitted(used[key], channels) if is_theirs else _per_channel(key, used[key], channels)
    if min(used["std"]) <= 0:
        raise UserError(f"data.std={used['std']} must be positive.")
    if isinstance(used["crop_pct"], str):
        raise UserError(f"data.crop_pct={used['crop_pct']} must be auto or a number above 0 and at most 1.")
    theirs = {key: _fitted(wanted[key], channels) if key in ("mean", "std") else wanted[key] for key in wanted}
    return ImageSettings(
        **used,
        from_weights=tuple(key for key in theirs if stated[key] == AUTO),
        against_weights=tuple(key for key in theirs if not _same(used[key], theirs[key])),
    )


def _fitted(values: Sequence[float], channels: int) -> list[float]:
    """Of as many channels as the images have: their mean where the weights were trained on another number."""
    return list(values) if len(values) == channels else [float(np.mean(values))] * channels


def _per_channel(key: str, value: float | str | Sequence[float], channels: int) -> list[float]:
    if isinstance(value, str):
        raise UserError(f"data.{key}={value} must be auto, a number, or one for each of {channels} channels.")
    values = [float(value)] if isinstance(value, int | float) else [float(v) for v in value]
    if len(values) not in (1, channels):
        raise UserError(f"data.{key}={values} has {len(values)} values for {channels} channels: give 1 or {channels}.")
    return values * channels if len(values) == 1 else values


def _same(used: Any, wanted: Any) -> bool:
    if isinstance(used, list):
        return all(math.isclose(a, b, abs_tol=0.01) for a, b in zip(used, wanted, strict=True))
    return bool(used == wanted)
