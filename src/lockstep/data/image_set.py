"""What a source of images hands over, checked, fingerprinted, and written as the node's image array."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.image_array import Layout, write_images
from lockstep.data.node_cache import require_space
from lockstep.runs.errors import UserError

WIDE_LIMIT_BYTES = 2**31  # above this, borders and a mirrored copy are not worth their room
IMAGES, LABELS = "images.bin", "labels.npy"
DECODED = "decoded.bin"  # where a source may leave images that are too many for the memory


def fingerprint(value: Any) -> str:
    """Hex over JSON values."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


@dataclass
class ImageSet:
    """All images in one order: first those to fit on, then validation, then test.

    images: (n, size, size, channels) uint8; labels: (n,) integers from 0; num_val is 0 where the source has no
    validation part of its own; skipped: names of files that could not be decoded.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: list[str]
    num_fit: int
    num_test: int
    num_val: int = 0
    skipped: list[str] = field(default_factory=list)
    draws_test: bool = False  # of those to fit on, whenever they are read

    def check(self, name: str, *, needs_training: bool = True) -> None:
        """Raises UserError where the parts do not fit together."""
        n, labels, num_classes = len(self.images), self.labels, len(self.class_names)
        if len(labels) != n or self.num_fit + self.num_val + self.num_test != n:
            raise UserError(f"{name} holds {n} images and {len(labels)} labels: one of its files is not complete.")
        if (needs_training and self.num_fit == 0) or (self.num_test == 0 and not self.draws_test):
            raise UserError(f"{name} holds {self.num_fit} training and {self.num_test} test images: it needs both.")
        wrong = labels[(labels < 0) | (labels >= num_classes)]
        if len(wrong):
            raise UserError(
                f"{name} has a label {wrong[0]}, but its {num_classes} classes go from 0 to {num_classes - 1}."
            )

    def content_hash(self) -> str:
        """Hex over names, labels and pixels, independent of the files that they came in."""
        digest = hashlib.sha256(json.dumps([self.class_names, self.num_fit, self.num_val]).encode())
        digest.update(np.ascontiguousarray(self.labels, np.int64).data)
        for start in range(0, len(self.images), 4096):
            digest.update(np.ascontiguousarray(self.images[start : start + 4096]).data)
        return digest.hexdigest()

    def layout(self, padding: int, mirrored: bool) -> Layout:
        """With borders and a mirrored copy of the images to fit on, unless that grows too large."""
        n, size, _, channels = self.images.shape
        wide = Layout(size, channels, n, padding, self.num_fit if mirrored else 0)
        return wide if wide.num_bytes <= WIDE_LIMIT_BYTES else Layout(size, channels, n)

    def write(self, folder: Path, layout: Layout) -> None:
        """IMAGES and LABELS in `folder`."""
        np.save(folder / LABELS, self.labels.astype(np.int64))
        if (folder / DECODED).exists() and not layout.padding and not layout.num_mirrored:
            (folder / DECODED).rename(folder / IMAGES)
            return
        require_space(folder, layout.num_bytes)
        flat = np.memmap(folder / IMAGES, np.uint8, "w+", shape=(layout.num_bytes,))
        write_images(flat, self.images, layout)
        flat.flush()
        (folder / DECODED).unlink(missing_ok=True)
