"""Images in memory, and targets of any shape: a class, several labels, a number or a mask for each, or a dict of these.

In a mask −1 marks the pixels that do not count, which are 255 in its file.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.data.decoding import decode_all
from lockstep.data.listing import TEST, TRAIN, VAL
from lockstep.runs.errors import UserError

VOID = 255
BINARY = ["0", str(VOID)]  # the classes of masks that have these two values alone
IMAGES, TARGETS = "images.npy", "targets.npz"
Arrays = dict[str, np.ndarray]
"""Targets (n, …) by name: int64, float32, or uint8 for masks; a target that stands alone has the name ""."""


@dataclass
class ImageSet:
    """All images in one order: first those to train on, then validation, then test."""

    images: np.ndarray  # (n, size, size, channels) uint8
    labels: np.ndarray | None  # (n,) integers from 0; None: `targets` are given
    class_names: list[str]  # of each label, of each column of `targets`, or of each class in masks
    num_test: int  # how many of the last images test; 0: they are drawn
    num_val: int = 0  # how many images before those validate; 0: they are drawn from the training images
    # In place of labels, (n, C) float several labels, (n,) float a number, (n, size, size) integers the class of each
    # pixel, −1 where it does not count, or a dict of these and of integers (n,).
    targets: Any = None

    def arrays(self) -> Arrays:
        if self.labels is not None:
            return {"": np.asarray(self.labels, np.int64)}
        found = {}
        for name, values in (self.targets if isinstance(self.targets, dict) else {"": self.targets}).items():
            values = np.asarray(values)
            if values.shape == self.images.shape[:3]:
                found[name] = np.where(values < 0, VOID, values).astype(np.uint8)
            else:
                found[name] = values.astype(np.float32 if values.dtype.kind == "f" else np.int64)
        return found

    @property
    def splits(self) -> np.ndarray:
        """Return (n,) with 0 for train, 1 for val, 2 for test."""
        num_train = max(len(self.images) - self.num_val - self.num_test, 0)
        return np.repeat([TRAIN, VAL, TEST], [num_train, self.num_val, self.num_test]).astype(np.int8)

    def check(self, name: str) -> "ImageSet":
        """Return itself, or raise UserError if the parts do not fit together."""
        n, last = len(self.images), len(self.class_names) - 1
        for values in (self.splits, *self.arrays().values()):
            if len(values) != n:
                raise UserError(f"{name} holds {n} images and {len(values)} labels: one of its files is not complete.")
        for label in [] if self.labels is None else self.labels[(self.labels < 0) | (self.labels > last)]:
            raise UserError(f"{name} has a label {label}; its {last + 1} classes go from 0 to {last}.")
        return self

    def hash(self) -> str:
        """Return a hash over names, targets and pixels."""
        if self.labels is not None:
            return hash_of_pixels(self.images, self.labels, self.class_names, self.splits)
        return hash_of_pixels(self.images, self.splits, self.class_names, self.splits, *self.arrays().values())

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the arrays; return the rest as JSON values."""
        np.save(folder / IMAGES, self.images)
        targets: dict[str, Any] = {f"target {name}": values for name, values in self.arrays().items()}
        np.savez(folder / TARGETS, **targets)
        rest = {"class_names": self.class_names, "num_test": self.num_test, "num_val": self.num_val}
        return {"set": rest, "data_hash": self.hash()}

    @classmethod
    def load(cls, folder: Path, rest: dict[str, Any]) -> "ImageSet":
        with np.load(folder / TARGETS) as arrays:
            targets = {name.removeprefix("target "): values for name, values in arrays.items()}
        return cls(np.load(folder / IMAGES, mmap_mode="c"), None, targets=targets, **rest)


def hash_of_pixels(
    images: np.ndarray, labels: np.ndarray, class_names: list[str], splits: np.ndarray, *others: np.ndarray
) -> str:
    """Return a hash over names, labels, pixels and other targets, independent of the files that they came in."""
    counts = [int((splits == split).sum()) for split in (TRAIN, VAL)]
    digest = hashlib.sha256(json.dumps([class_names, *counts]).encode())
    digest.update(np.ascontiguousarray(labels, np.int64).data)
    for values in (images, *others):
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


def classes_of(mask: Tensor) -> Tensor:
    """Return a mask of uint8 as int64, with −1 for 255."""
    return torch.where(mask == VOID, -1, mask.long())


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
