"""Targets of any shape: a class, several labels, a number, a mask, or a dict of these.

In a mask −1 marks the pixels that do not count, which are 255 in its file.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from lockstep.data.framing import VOID
from lockstep.process.errors import UserError

Arrays = dict[str, np.ndarray]
"""Targets (n, …) by name: int64, float32, or uint8 for masks. A single target has the name ""."""

# Label numbers of masks are small and mostly in use. Grey levels leave nearly all numbers unused.
LEAST_GREY_LEVEL = 16
MOST_GREY_LEVELS = 32
BINARY = {0, VOID}


def find_target_kind(targets: Arrays, mask_names: Iterable[str]) -> str:
    """Return class, labels, number, mask or dict."""
    if {*targets, *mask_names} != {""}:
        return "dict"
    if not targets:
        return "mask"
    if targets[""].dtype.kind == "i":
        return "class"
    return "number" if targets[""].ndim == 1 else "labels"


def compute_scale(numbers: np.ndarray) -> dict[str, float]:
    """Return mean and standard deviation of training targets (n,), by which a task standardises.

    The deviation of equal numbers is 1. Without numbers there is no scale.
    """
    if not len(numbers):
        return {}
    std = float(numbers.std(dtype=np.float64))
    return {"target_mean": float(numbers.mean(dtype=np.float64)), "target_std": std or 1.0}


def to_masks(arrays: Iterable[np.ndarray]) -> tuple[Any, ...]:
    """Return masks that torchvision's transforms move with their image."""
    from torchvision.tv_tensors import Mask

    return tuple(Mask(torch.from_numpy(np.array(array, np.uint8))) for array in arrays)


def to_mask_pixels(classes: np.ndarray, data_name: str) -> np.ndarray:
    """Return the classes of pixels as uint8, 255 where they are negative and do not count.

    Raises:
        UserError: a class is above 255.
    """
    largest = classes.max(initial=0)
    if largest > VOID:
        raise UserError(
            f"{data_name}: a mask has the value {largest}: 0 to 254 are classes, 255 does not "
            "count."
        )
    return np.where(classes < 0, VOID, classes).astype(np.uint8)


def find_levels(masks: Iterable[np.ndarray]) -> list[int]:
    """Return the grey levels that occur in masks (height, width) uint8, ascending."""
    occurs = np.zeros(256, bool)
    for mask in masks:
        occurs[mask.ravel()] = True
    return np.flatnonzero(occurs).tolist()


def name_mask_classes(levels: list[int]) -> list[str]:
    """Return the names of the classes in masks that have these grey levels.

    255 does not count, but in levels that are evenly spaced up to 255, as 0, 255 or 0, 128, 255,
    it is a class. Levels that use few of the numbers up to the largest one, as 0, 127, 254, are
    one class each. Otherwise the classes are 0 to the largest number.
    """
    if VOID in levels and set(levels) <= BINARY:
        return ["0", "255"]
    if VOID in levels and _are_evenly_spaced(levels):
        return [str(level) for level in levels]
    numbers = [level for level in levels if level != VOID]
    largest = max(numbers, default=-1)
    if largest >= LEAST_GREY_LEVEL and len(numbers) <= min(MOST_GREY_LEVELS, largest / 4):
        return [str(level) for level in numbers]
    return [str(level) for level in range(largest + 1)]


def _are_evenly_spaced(levels: list[int]) -> bool:
    """Return whether levels divide 0 to 255 evenly; an export rounds up or down."""
    even = np.linspace(0, VOID, len(levels))
    return len(levels) <= MOST_GREY_LEVELS and bool((np.abs(even - levels) <= 1).all())


def find_grey_levels(class_names: Iterable[str]) -> list[int] | None:
    """Return the grey level of each class in its masks; None where it is the class's number."""
    names = list(class_names)
    levels = [int(name) for name in names if name.isascii() and name.isdecimal()]
    if len(levels) < len(names) or not LEAST_GREY_LEVEL <= max(levels, default=0) <= VOID:
        return None
    return None if levels == list(range(len(names))) else levels


def describe_grey_levels(class_names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence where grey levels are numbered as classes, but not for 0 and 255."""
    levels = find_grey_levels(class_names)
    if levels is None or set(levels) <= BINARY:
        return
    level_names = ", ".join(map(str, levels))
    yield (
        f"The masks have the grey levels {level_names}, which are the classes 0 to "
        f"{len(levels) - 1}. If they mean anything else, save the class of each pixel as 0, 1, "
        "2 …, and 255 where it does not count."
    )


def number_pixels(mask: np.ndarray, levels: list[int] | None) -> np.ndarray:
    """Return the class of each pixel, 255 where it does not count.

    Args:
        mask: (height, width) uint8.
        levels: the grey level of each class; None: the mask has the numbers of classes.
    """
    if levels is None:
        return mask
    table = np.full(256, VOID, np.uint8)
    table[levels] = np.arange(len(levels))
    return table[mask]
