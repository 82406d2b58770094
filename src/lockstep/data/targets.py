"""Images in memory, and targets of any shape: a class, several labels, a number or a mask for each, or a dict of these.

In a mask −1 marks the pixels that do not count, which are 255 in its file.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep.data.decoding import decode_all
from lockstep.data.framing import VOID
from lockstep.data.listing import TEST, TRAIN, VAL
from lockstep.runs.errors import UserError

BINARY = ["0", str(VOID)]  # the classes of masks that have these two values alone
Arrays = dict[str, np.ndarray]
"""Targets (n, …) by name: int64, float32, or uint8 for masks; a target that stands alone has the name ""."""


@dataclass
class ImageSet:
    """All images in one order: first those to train on, then validation, then test."""

    images: np.ndarray  # (n, size, size, channels) uint8
    # (n,) integers from 0 the classes, (n, C) float several labels, (n,) float a number, (n, size, size) integers the
    # class of each pixel, −1 where it does not count, or a dict of these.
    targets: Any
    class_names: list[str]  # of each class, of each column of labels, or of each class in masks
    num_test: int  # how many of the last images test; 0: they are drawn
    num_val: int = 0  # how many images before those validate; 0: they are drawn from the training images

    def arrays(self) -> Arrays:
        """Return the targets by name.

        Raises:
            UserError: they do not fit the images or the class names.
        """
        found, n = {}, len(self.images)
        for name, values in (self.targets if isinstance(self.targets, dict) else {"": self.targets}).items():
            values = np.asarray(values)
            if len(values) != n:
                raise UserError(f"There are {n} images and {len(values)} labels: one of the files is not complete.")
            if values.shape == self.images.shape[:3]:
                found[name] = np.where(values < 0, VOID, values).astype(np.uint8)
            else:
                is_float = values.dtype.kind == "f" or (not name and values.ndim == 2)  # several labels
                found[name] = values.astype(np.float32 if is_float else np.int64)
        if kind_of(found, []) == "class" and not set(np.unique(found[""])) <= set(range(len(self.class_names))):
            most = len(self.class_names) - 1
            raise UserError(f"A label is {found[''].min()} or {found[''].max()}; the classes go from 0 to {most}.")
        return found

    @property
    def splits(self) -> np.ndarray:
        """Return (n,) with 0 for train, 1 for val, 2 for test."""
        num_train = max(len(self.images) - self.num_val - self.num_test, 0)
        return np.repeat([TRAIN, VAL, TEST], [num_train, self.num_val, self.num_test]).astype(np.int8)


def hash_of(images: np.ndarray, targets: Arrays, class_names: list[str], splits: np.ndarray) -> str:
    """Return a hash over names, targets and pixels, independent of the files that they came in."""
    digest = hashlib.sha256(json.dumps([class_names, *np.bincount(splits, minlength=3)[:2].tolist()]).encode())
    for values in (*targets.values(), images):
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def kind_of(targets: Arrays, mask_names: Iterable[str]) -> str:
    """Return class, labels, number, mask or dict."""
    if {*targets, *mask_names} != {""}:
        return "dict"
    if not targets:
        return "mask"
    return "class" if targets[""].dtype.kind == "i" else "number" if targets[""].ndim == 1 else "labels"


def as_masks(arrays: Iterable[np.ndarray]) -> tuple[Any, ...]:
    """Return masks that torchvision's transforms move with their image."""
    from torchvision.tv_tensors import Mask

    return tuple(Mask(torch.from_numpy(np.array(array, np.uint8))) for array in arrays)


def mask_classes(count: int, read: Callable[[int], np.ndarray]) -> list[str]:
    """Return the names of the classes in all masks: 0 to the largest value, or 0 and 255 of binary masks.

    Args:
        read: position → (height, width) uint8.
    """
    is_there = np.zeros(256, bool)

    def look(i: int) -> None:
        is_there[read(i).ravel()] = True

    decode_all(count, look)
    values = np.flatnonzero(is_there).tolist()
    if VOID in values and set(values) <= {0, VOID}:
        return BINARY
    return [str(value) for value in range(1 + max((value for value in values if value != VOID), default=-1))]
