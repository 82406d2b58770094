"""The base of sources, which say what images there are and open them, and the source of arrays.

A data module reads everything about its images here, whether they lie in memory, files, shards or
a torch Dataset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from lockstep.data.content_hash import hash_arrays
from lockstep.data.listing import TEST, TRAIN, VAL, LeftOut
from lockstep.data.targets import (
    VOID,
    Arrays,
    find_grey_levels,
    find_target_kind,
    to_mask_pixels,
    to_masks,
)
from lockstep.process.errors import UserError


class Source:
    """Images, with all that is said of them before one is opened.

    Attributes:
        class_names: the names of the classes, of the label columns, or of the classes in masks.
        splits: (n,) int8: 0 train, 1 val, 2 test, in ascending order.
        targets: (n, …) by name, all but the masks.
        mask_names: the names of the masks, which `open` returns behind their image.
        columns: (n,) float64 by name, further numbers of each image, from the columns of a table.
        groups: (n,) int64, images that stay in one split together; None: each image is alone.
        mask_table: (256,) uint8, the class of each number in masks; None: it is the class.
        has_grey_levels: the classes of pixels are numbered, and the masks have their grey levels.
        left_out: names of what is skipped, by reason.
        warnings: sentences for the log.
        list_hash: a hash of names and sizes, by which runs of version 2.0.0 are compared.
        pixels: images and each mask, (n, side, side, channels) uint8; deep images are float32 from
            0 to 255. [] if they are not in memory.
        num_bytes: (n,) the bytes of each image; only images of one size can be equal.
        is_comparable: the images can be compared with each other.
        reads_files: comparing the images takes as long as reading them.
    """

    class_names: list[str]
    splits: np.ndarray
    targets: Arrays
    mask_names: Sequence[str] = ()
    columns: Mapping[str, np.ndarray] = MappingProxyType({})
    groups: np.ndarray | None = None
    mask_table: np.ndarray | None = None
    has_grey_levels = False
    left_out: LeftOut
    warnings: list[str]
    list_hash = ""
    pixels: Sequence[np.ndarray] = ()
    num_bytes: np.ndarray
    is_comparable = True
    reads_files = False

    def open(self, position: int) -> tuple[Any, ...]:
        """Return the whole image, Pillow's RGB or L, and its masks, torchvision's Mask.

        A deep image is torchvision's, of floats from 0 to 1.
        """
        raise NotImplementedError

    def read(self, position: int) -> bytes:
        """Return the bytes by which an image is compared with others of its size."""
        raise NotImplementedError

    def hash(self) -> str:
        """Return what identifies the images with their splits and targets."""
        raise NotImplementedError

    def name(self, position: int) -> str:
        return f"image {position}"

    def location(self, position: int) -> str:
        """Return what errors call an image, with its line in a table."""
        return self.name(position)

    def __len__(self) -> int:
        return len(self.splits)

    @property
    def target_kind(self) -> str:
        """Return class, labels, number, mask or dict."""
        return find_target_kind(self.targets, self.mask_names)

    @property
    def grey_levels(self) -> list[int] | None:
        """Return the grey level of each class in masks; None: masks have the classes' numbers."""
        return find_grey_levels(self.class_names) if self.has_grey_levels else None

    @property
    def classes(self) -> np.ndarray:
        """Return (n,) int64, the class of each image; zeros for other targets."""
        if self.target_kind == "class":
            return self.targets[""]
        return np.zeros(len(self), np.int64)

    def target_name(self, position: int) -> str:
        """Return the class, labels or number of an image; images of one name have equal targets."""
        if self.target_kind in ("mask", "dict"):
            return ""
        target = self.targets[""][position]
        if self.target_kind == "number":
            # It has as many digits as tell it from every other number of its type.
            return np.format_float_positional(target, trim="-")
        numbers = [target] if self.target_kind == "class" else np.flatnonzero(target > 0)
        return ", ".join(self.class_names[number] for number in numbers)

    def match_classes(self, class_names: Sequence[str], data_name: str) -> None:
        """Number the labels as a checkpoint's `class_names` do, of which the images may lack some.

        Raises:
            UserError: the images have a class that is not among them, or classes of a dict are
                numbered in another order.
        """
        # Masks of one class and of pixels that do not count have the names 0 and 255.
        names = [n for n in self.class_names if not (self.has_grey_levels and n == str(VOID))]
        for name in names:
            if name not in class_names:
                raise UserError(
                    f"{data_name} has the class {name}, which the checkpoint does not know; it "
                    f"knows {', '.join(class_names[:20])}. Rename the class or remove its images."
                )
        number_of = np.array([class_names.index(name) for name in names], np.int64)
        if self.target_kind == "labels":
            # A label that these images lack is 0.
            labels = np.zeros((len(self), len(class_names)), np.float32)
            labels[:, number_of] = self.targets[""]
            self.targets = {"": labels}
        elif self.target_kind == "class":
            self.targets = {"": number_of[self.targets[""]]}
        elif not self.has_grey_levels and names != list(class_names[: len(names)]):
            self._renumber_masks(number_of, data_name)
        self.class_names = list(class_names)

    def _renumber_masks(self, number_of: np.ndarray, data_name: str) -> None:
        """Number the classes in masks anew; a number without a name does not count."""
        # Which targets of a dict have these classes is not known.
        if self.target_kind == "dict":
            raise UserError(
                f"{data_name} numbers its classes in another order than the checkpoint, and "
                "targets in a dict are not renumbered. Number them as in training."
            )
        table = np.full(256, VOID, np.uint8)
        table[: len(number_of)] = number_of
        if self.mask_table is not None:
            table = table[self.mask_table]
        self.mask_table = table


@dataclass(eq=False)
class ImageSet(Source):
    """All images in one order: first those to train on, then validation, then test.

    Args:
        images: (n, size, size, channels) uint8.
        targets: (n,) integers from 0 the classes, (n, C) float several labels, (n,) float a number,
            (n, size, size) integers the class of each pixel, −1 where it does not count, or a dict.
        class_names: the names of the classes, of the label columns, or of the classes in masks.
        num_test: how many of the last images test; 0: they are drawn.
        num_val: how many images before those validate; 0: drawn from the training images.
        columns: (n,) numbers of each image by name, for data.inputs and data.sampling.

    Raises:
        UserError: the targets do not fit the images or the class names.
    """

    images: np.ndarray
    targets: Any
    class_names: list[str]
    num_test: int
    num_val: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.columns = {name: np.asarray(each, float) for name, each in self.columns.items()}
        self.left_out = {}
        self.warnings = []
        count = len(self.images)
        counts = [max(count - self.num_val - self.num_test, 0), self.num_val, self.num_test]
        self.splits = np.repeat([TRAIN, VAL, TEST], counts).astype(np.int8)
        self.num_bytes = np.zeros(count, np.int64)

        targets = self.targets if isinstance(self.targets, dict) else {"": self.targets}
        self.targets = {
            name: self._convert_targets(name, np.asarray(each)) for name, each in targets.items()
        }
        self.mask_names = [name for name, each in self.targets.items() if each.dtype == np.uint8]
        if find_target_kind(self.targets, ()) == "class":
            self._refuse_other_classes(self.targets[""])
        arrays = self.targets | {f"column {name}": each for name, each in self.columns.items()}
        self._hash = hash_arrays([self.images], arrays, self.class_names, self.splits)

        masks = [self.targets.pop(name)[..., None] for name in self.mask_names]
        # torchvision's CIFAR10 has the channels outermost.
        self.pixels = [np.ascontiguousarray(array) for array in (self.images, *masks)]
        self.images = self.pixels[0]

    def _convert_targets(self, name: str, values: np.ndarray) -> np.ndarray:
        if len(values) != len(self.images):
            raise UserError(
                f"There are {len(self.images)} images and {len(values)} labels: one of the files "
                "is not complete."
            )
        if values.shape == self.images.shape[:3]:
            return to_mask_pixels(values, "ImageSet")
        is_several_labels = not name and values.ndim == 2
        if values.dtype.kind == "f" or is_several_labels:
            return values.astype(np.float32)
        return values.astype(np.int64)

    def _refuse_other_classes(self, labels: np.ndarray) -> None:
        most = len(self.class_names) - 1
        if labels.min(initial=0) < 0 or labels.max(initial=0) > most:
            raise UserError(
                f"A label is {labels.min()} or {labels.max()}; the classes go from 0 to {most}."
            )

    def open(self, position: int) -> tuple[Any, ...]:
        pixels, *masks = (array[position] for array in self.pixels)
        is_grey = pixels.shape[2] == 1
        image = Image.fromarray(pixels[..., 0] if is_grey else pixels)
        return image, *to_masks([mask[..., 0] for mask in masks])

    def read(self, position: int) -> bytes:
        return self.pixels[0][position].tobytes()

    def hash(self) -> str:
        return self._hash
