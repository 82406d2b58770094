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
"""Targets (n, …) by name: int64, float32, or uint8 for masks. The name of a single one is ""."""

# Class numbers in masks are small, and most of them are in use. Grey levels leave most unused.
LEAST_GREY_LEVEL = 16
MAX_GREY_LEVELS = 32
BINARY = {0, VOID}


def compute_scale(numbers: np.ndarray) -> dict[str, float]:
    """Return the mean and the standard deviation of training targets (n,), by names of a task.

    If all numbers are equal, the deviation is 1. Without numbers the result is empty.
    """
    if not len(numbers):
        return {}
    std = float(numbers.std(dtype=np.float64))
    return {"target_mean": float(numbers.mean(dtype=np.float64)), "target_std": std or 1.0}


def to_masks(arrays: Iterable[np.ndarray]) -> tuple[Any, ...]:
    """Return masks of a type that torchvision's transforms crop and flip like their image."""
    from torchvision.tv_tensors import Mask

    return tuple(Mask(torch.from_numpy(np.array(array, np.uint8))) for array in arrays)


def to_mask_pixels(classes: np.ndarray, data_name: str) -> np.ndarray:
    """Return the classes of pixels as uint8. A negative class, which does not count, becomes 255.

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

    There are three cases:

    - Levels are evenly spaced up to 255, as 0, 255 or 0, 128, 255: each is a class, also 255.
    - They use few of the numbers up to the largest one, as 0, 127, 254: each is a class but 255,
      which does not count.
    - All others: the classes are 0 to the largest number, and 255 does not count.
    """
    if VOID in levels and set(levels) <= BINARY:
        return ["0", "255"]
    if VOID in levels and _are_evenly_spaced(levels):
        return [str(level) for level in levels]
    numbers = [level for level in levels if level != VOID]
    largest = max(numbers, default=-1)
    if largest >= LEAST_GREY_LEVEL and len(numbers) <= min(MAX_GREY_LEVELS, largest / 4):
        return [str(level) for level in numbers]
    return [str(level) for level in range(largest + 1)]


def _are_evenly_spaced(levels: list[int]) -> bool:
    """Return whether levels divide 0 to 255 evenly. Programs round them up or down."""
    even = np.linspace(0, VOID, len(levels))
    return len(levels) <= MAX_GREY_LEVELS and bool((np.abs(even - levels) <= 1).all())


def find_grey_levels(class_names: Iterable[str]) -> list[int] | None:
    """Return the grey level of each class in its masks; None: the masks hold class numbers."""
    names = list(class_names)
    levels = [int(name) for name in names if name.isascii() and name.isdecimal()]
    if len(levels) < len(names) or not LEAST_GREY_LEVEL <= max(levels, default=0) <= VOID:
        return None
    return None if levels == list(range(len(names))) else levels


def describe_grey_levels(class_names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence if grey levels other than 0 and 255 are numbered as classes."""
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
        levels: the grey level of each class; None: the mask holds class numbers.
    """
    if levels is None:
        return mask
    table = np.full(256, VOID, np.uint8)
    table[levels] = np.arange(len(levels))
    return table[mask]
