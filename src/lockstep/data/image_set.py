"""Labelled images in memory, as a data set of one's own returns them from `read`."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np

from lockstep.data.listing import TEST, TRAIN, VAL
from lockstep.runs.errors import UserError


@dataclass
class ImageSet:
    """All images in one order: first those to train on, then validation, then test.

    Args:
        images: (n, size, size, channels) uint8.
        labels: (n,) integers from 0.
        class_names: the name of each label.
        num_test: how many of the last images test; 0: they are drawn.
        num_val: how many images before those validate; 0: they are drawn from the training images.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: list[str]
    num_test: int
    num_val: int = 0

    @property
    def splits(self) -> np.ndarray:
        """(n,) 0 train, 1 val, 2 test."""
        num_train = len(self.labels) - self.num_val - self.num_test
        return np.repeat([TRAIN, VAL, TEST], [num_train, self.num_val, self.num_test]).astype(np.int8)

    def check(self, name: str) -> None:
        """Raise UserError if the parts do not fit together."""
        n, num_classes = len(self.images), len(self.class_names)
        if len(self.labels) != n:
            raise UserError(f"{name} holds {n} images and {len(self.labels)} labels: one of its files is not complete.")
        if n <= self.num_val + self.num_test:
            raise UserError(f"{name} holds {n} images, of which none is left to train on.")
        wrong = self.labels[(self.labels < 0) | (self.labels >= num_classes)]
        if len(wrong):
            raise UserError(
                f"{name} has a label {wrong[0]}, but its {num_classes} classes go from 0 to {num_classes - 1}."
            )


def hash_of_pixels(
    images: np.ndarray, labels: np.ndarray, class_names: list[str], splits: np.ndarray, kept: np.ndarray | None = None
) -> str:
    """Return a hash over names, labels and pixels, independent of the files that they came in.

    Args:
        kept: positions of the images that count; None: all.
    """
    kept = np.arange(len(labels)) if kept is None else kept
    counts = [int((splits[kept] == split).sum()) for split in (TRAIN, VAL)]
    digest = hashlib.sha256(json.dumps([class_names, *counts]).encode())
    digest.update(np.ascontiguousarray(labels[kept], np.int64).data)
    for start in range(0, len(kept), 4096):
        digest.update(np.ascontiguousarray(images[kept[start : start + 4096]]).data)
    return digest.hexdigest()
