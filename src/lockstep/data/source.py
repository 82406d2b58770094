"""The base of all sources of images, and the source of images in arrays.

A source lists images with their targets, and opens them. A data module has one, whether the images
lie in memory, in files, in shards or in a torch Dataset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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
    to_mask_pixels,
    to_masks,
)
from lockstep.process.errors import UserError


class Source:
    """A list of images, with everything that is known of them before one is opened.

    Attributes:
        class_names: the names of the classes, of the label columns, or of the classes in masks.
        split_ids: (n,) int8, the splits that the source names: 0 train, 1 val, 2 test, ascending.
        targets: (n, …) by name, without the masks.
        mask_names: the names of the masks, which `open` returns behind their image.
        columns: (n,) float64 by name, further numbers of each image, from the columns of a table.
        groups: (n,) int64, the group of each image. Images of one group stay in one split. None:
            each image is a group of its own.
        class_of_mask_value: (256,) uint8, the class of each value in masks; None: values are
            classes.
        has_grey_levels: the masks have grey levels, which are numbered as classes.
        left_out: the names of the files that are skipped, by reason.
        warnings: sentences for the log.
        list_hash: a hash of names and sizes. Runs of version 2.0.0 are compared by it.
        pixels: an array of the images and one of each mask, (n, side, side, channels) uint8; deep
            images are float32 from 0 to 255. [] if they are not in memory.
        num_bytes: (n,) the bytes of each image. Images of different sizes are not equal.
        is_comparable: the images can be compared with each other.
        reads_files: a comparison of the images has to read their files.
    """

    class_names: list[str]
    split_ids: np.ndarray
    targets: Arrays
    mask_names: Sequence[str] = ()
    columns: Mapping[str, np.ndarray] = MappingProxyType({})
    groups: np.ndarray | None = None
    class_of_mask_value: np.ndarray | None = None
    has_grey_levels = False
    left_out: LeftOut
    warnings: list[str]
    list_hash = ""
    pixels: Sequence[np.ndarray] = ()
    num_bytes: np.ndarray
    is_comparable = True
    reads_files = False

    def open(self, position: int) -> tuple[Any, ...]:
        """Return the whole image and its masks.

        The image is Pillow's, in RGB or L. A deep one is torchvision's, of floats from 0 to 1. The
        masks are torchvision's.
        """
        raise NotImplementedError

    def read_bytes(self, position: int) -> bytes:
        """Return the bytes of an image as they are stored. Equal images have equal bytes."""
        raise NotImplementedError

    def hash(self) -> str:
        """Return a hash of the images, their splits and their targets."""
        raise NotImplementedError

    def name(self, position: int) -> str:
        return f"image {position}"

    def location(self, position: int) -> str:
        """Return the name of an image for errors, with its line in a table."""
        return self.name(position)

    def __len__(self) -> int:
        return len(self.split_ids)

    @cached_property
    def target_kind(self) -> str:
        """Return class, labels, number, mask or dict."""
        if {*self.targets, *self.mask_names} != {""}:
            return "dict"
        if not self.targets:
            return "mask"
        target = self.targets[""]
        if target.dtype.kind == "i":
            return "class"
        return "number" if target.ndim == 1 else "labels"

    @property
    def grey_levels(self) -> list[int] | None:
        """Return the grey level of each class in masks; None: the masks hold class numbers."""
        return find_grey_levels(self.class_names) if self.has_grey_levels else None

    @property
    def classes(self) -> np.ndarray:
        """Return (n,) int64, the class of each image; zeros for other targets."""
        if self.target_kind == "class":
            return self.targets[""]
        return np.zeros(len(self), np.int64)

    def target_name(self, position: int) -> str:
        """Return the class, labels or number of an image in words; "" for other targets.

        Two images have equal targets if these words are equal.
        """
        if self.target_kind in ("mask", "dict"):
            return ""
        target = self.targets[""][position]
        if self.target_kind == "number":
            # These are the fewest digits that no other number of its type has.
            return np.format_float_positional(target, trim="-")
        numbers = [target] if self.target_kind == "class" else np.flatnonzero(target > 0)
        return ", ".join(self.class_names[number] for number in numbers)

    def match_classes(self, class_names: Sequence[str], data_name: str) -> None:
        """Number the labels as a checkpoint does.

        Args:
            class_names: the classes of the checkpoint. The images may lack some of them.

        Raises:
            UserError: the images have a class that the checkpoint lacks, or the targets are a dict
                whose classes are in another order.
        """
        # Masks with a single class and pixels that do not count have the names 0 and 255.
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
        """Number the classes in masks anew. Pixels of a class without a name do not count."""
        # Nothing says which targets of a dict have these classes.
        if self.target_kind == "dict":
            raise UserError(
                f"{data_name} numbers its classes in another order than the checkpoint, and "
                "targets in a dict are not renumbered. Number them as in training."
            )
        table = np.full(256, VOID, np.uint8)
        table[: len(number_of)] = number_of
        if self.class_of_mask_value is not None:
            table = table[self.class_of_mask_value]
        self.class_of_mask_value = table


@dataclass(eq=False)
class ImageSet(Source):
    """All images in one order: first those to train on, then validation, then test.

    Args:
        images: (n, size, size, channels) uint8.
        targets: classes are (n,) integers from 0, several labels (n, C) floats, numbers (n,)
            floats, and masks (n, size, size) integers, −1 where a pixel does not count. A dict
            has several targets by name.
        class_names: the names of the classes, of the label columns, or of the classes in masks.
        num_test: the number of test images, which are the last ones; 0: they are drawn.
        num_val: the number of validation images, which come before those; 0: they are drawn.
        columns: (n,) numbers of each image by name, for data.inputs and data.sampling.

    Raises:
        UserError: the images are no bytes, or the targets do not fit the images or the class names.
    """

    images: np.ndarray
    targets: Any
    class_names: list[str]
    num_test: int
    num_val: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.images = np.asarray(self.images)
        if self.images.dtype != np.uint8:
            raise UserError(
                f"The images are {self.images.dtype}, and ImageSet takes uint8 from 0 to 255: give "
                "images.astype(np.uint8), of pixels from 0 to 1 (255 * images).astype(np.uint8)."
            )
        self.columns = {name: np.asarray(each, float) for name, each in self.columns.items()}
        self.left_out = {}
        self.warnings = []
        count = len(self.images)
        counts = [max(count - self.num_val - self.num_test, 0), self.num_val, self.num_test]
        self.split_ids = np.repeat([TRAIN, VAL, TEST], counts).astype(np.int8)
        self.num_bytes = np.zeros(count, np.int64)

        targets = self.targets if isinstance(self.targets, dict) else {"": self.targets}
        converted = {
            name: self._convert_targets(name, np.asarray(each)) for name, each in targets.items()
        }
        masks = {name: each for name, each in converted.items() if each.dtype == np.uint8}
        self.mask_names = list(masks)
        self.targets = {name: converted[name] for name in converted if name not in masks}
        if self.target_kind == "class":
            self._refuse_other_classes(self.targets[""])

        hashed = converted | {f"column {name}": each for name, each in self.columns.items()}
        self._hash = hash_arrays([self.images], hashed, self.class_names, self.split_ids)
        # torchvision's CIFAR10 has the channels outermost.
        self.images = np.ascontiguousarray(self.images)
        mask_pixels = [np.ascontiguousarray(mask[..., None]) for mask in masks.values()]
        self.pixels = [self.images, *mask_pixels]

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
        if not masks:
            return (image,)
        return image, *to_masks([mask[..., 0] for mask in masks])

    def read_bytes(self, position: int) -> bytes:
        return self.pixels[0][position].tobytes()

    def hash(self) -> str:
        return self._hash
