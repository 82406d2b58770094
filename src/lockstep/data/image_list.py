"""The source of encoded images in files or shards, which are listed before any image is opened."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.content_hash import hash_of_files
from lockstep.data.decoding import CorruptImage, open_mask, size_of
from lockstep.data.listing import (
    Item,
    LeftOut,
    alike_names,
    counts_of,
    hash_of_json,
    merged_labels,
    ordered_classes,
    tidy_labels,
)
from lockstep.data.reading import Reading
from lockstep.data.source import Source
from lockstep.data.targets import as_masks, classes_of_pixels
from lockstep.process.errors import UserError


class ImageList(Source):
    """A list of n images: first those to train on, then validation, then test.

    Attributes:
        numbers: (n,) int64 classes, (n,) float32 numbers or (n, C) float32 labels; zeros where
            there are masks, nan where a label is unknown.
        reading: how a file becomes pixels.

    Args:
        folder: what names and files are relative to.
        target: what labels are: class, number, or mask, a path relative to `folder`.
        label_columns: with several labels, their names.
        unknown: the number of several labels that means "not known"; None: there is none.
        left_out: for the log.
        warnings: sentences for the log.
    """

    reading = Reading()
    reads_files = True

    def __init__(
        self,
        folder: Path,
        items: Sequence[Item],
        *,
        target: str = "class",
        label_columns: Sequence[str] = (),
        unknown: float | None = None,
        left_out: LeftOut | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.left_out = left_out or {}
        self.warnings = list(warnings)
        if not items:
            raise UserError(f"{folder} has no images (left out: {counts_of(self.left_out)}).")
        items = sorted(items, key=lambda item: item.split)
        self._store(items)

        self.columns = {}
        for column in items[0].numbers:
            numbers = [_further_number(folder, item, column) for item in items]
            self.columns[column] = np.array(numbers)
        self._set_targets(items, target, label_columns)
        if unknown is not None and label_columns:
            self.numbers[self.numbers == unknown] = np.nan

    def _set_targets(
        self, items: Sequence[Item], target: str, label_columns: Sequence[str]
    ) -> None:
        """Make the labels of the items numbers, or the names of masks."""
        labels = [item.label for item in items]
        self._masks = _as_bytes([])
        self.class_names = list(label_columns)
        if target == "mask":
            self.has_grey_levels = True
            self.mask_names = [""]
            self.numbers = np.zeros(len(items), np.int64)
            self.targets = {}
            self._masks = _as_bytes(labels)
            return
        if label_columns or target == "number":
            self.numbers = _numbers(self.folder, items, len(label_columns))
        else:
            self.numbers = self._classes_of(labels)
            self.warnings += alike_names(self.class_names)
        self.targets = {"": self.numbers}

    def _store(self, items: Sequence[Item]) -> None:
        """Keep what the items have, in arrays that worker processes share.

        They would copy strings one by one.
        """
        self._names = _as_bytes([item.name for item in items])
        self.splits = np.array([item.split for item in items], np.int8)
        self.size = _column(items, "size")
        self._line = _column(items, "line")
        self._mtime = _column(items, "mtime")
        self._start = _column(items, "start")
        self._files = _numbered([item.file for item in items])
        groups = _numbered([item.group for item in items])
        self.groups = groups[1] if groups else None
        names = [os.fsdecode(name) for name in self._names]
        self.list_hash = hash_of_json([names, self.size.tolist()])

    def _classes_of(self, labels: Sequence[str]) -> np.ndarray:
        """Return (n,) int64 classes, and set their names."""
        tidy = tidy_labels(set(labels))
        self.warnings += merged_labels(tidy)
        self.class_names = ordered_classes(tidy.values())
        number_of = {name: number for number, name in enumerate(self.class_names)}
        return np.array([number_of[tidy[label]] for label in labels], np.int64)

    def name(self, i: int) -> str:
        return os.fsdecode(self._names[i])

    def where(self, i: int) -> str:
        line = int(self._line[i])
        return f"{self.name(i)} (line {line})" if line else self.name(i)

    def path(self, i: int) -> str:
        """Return the image's name with the folder before it."""
        return str(self.folder / self.name(i))

    def mask_path(self, i: int) -> Path:
        return self.folder / os.fsdecode(self._masks[i])

    def read(self, i: int, first: int = 0, count: int | None = None) -> bytes:
        """Return the encoded image, or `count` of its bytes from `first` on.

        Raises:
            CorruptImage: it cannot be read, or the file has become shorter.
        """
        file = self._files[0][self._files[1][i]] if self._files else self.path(i)
        count = int(self.size[i]) if count is None else count
        try:
            with open(file, "rb") as opened:
                opened.seek(int(self._start[i]) + first)
                data = opened.read(count)
        except OSError as error:
            raise CorruptImage(f"{self.path(i)} cannot be read ({error.strerror})") from None
        if len(data) < count:
            raise CorruptImage(f"{self.path(i)} is shorter than when it was listed")
        return data

    def file(self, i: int) -> Path | bytes:
        """Return the path of an image's own file, or its bytes in a file of several images."""
        return self.read(i) if self._files else Path(self.path(i))

    def read_mask(self, i: int) -> np.ndarray:
        """Return the grey level of each pixel, (height, width) uint8."""
        return open_mask(self.mask_path(i), self.reading.max_megapixels)

    def open(self, i: int) -> tuple[Any, ...]:
        name = self.path(i)
        image = self.reading.open(self.read(i), name)
        if not self.mask_names:
            return (image,)
        mask = self.read_mask(i)
        width, height = size_of(image)
        if mask.shape != (height, width):
            raise CorruptImage(
                f"the mask of {name} has {mask.shape[1]}×{mask.shape[0]} "
                f"pixels and its image {width}×{height}"
            )
        return image, *as_masks([classes_of_pixels(mask, self.grey_levels)])

    @property
    def identity(self) -> str:
        """A hash that changes with any name, size, time, target or split."""
        masks = []
        for i in range(len(self._masks)):
            stat = os.stat(self.mask_path(i))
            masks.append((os.fsdecode(self._masks[i]), stat.st_size, stat.st_mtime_ns))
        arrays = [array.tolist() for array in (self._mtime, self.numbers, self.splits)]
        return hash_of_json([self.list_hash, str(self.folder), self.class_names, masks, arrays])

    def hash(self) -> str:
        return hash_of_files(self)


def _column(items: Sequence[Item], name: str) -> np.ndarray:
    return np.array([getattr(item, name) for item in items], np.int64)


def _as_bytes(names: Sequence[str]) -> np.ndarray:
    return np.array([os.fsencode(name) for name in names], np.bytes_)


def _numbered(values: list[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the distinct values and the number of each value; None where a value is missing."""
    if None in values:
        return None
    distinct, numbers = np.unique(values, return_inverse=True)
    return distinct, numbers


def _numbers(folder: Path, items: Sequence[Item], columns: int) -> np.ndarray:
    """Return (n,) float32, or (n, columns) where an item has several labels."""
    shape = (columns,) if columns else ()
    return np.array([_number(folder, item, shape) for item in items], np.float32)


def _number(folder: Path, item: Item, shape: tuple[int, ...]) -> np.ndarray:
    try:
        number = np.asarray(item.label, np.float32)
    except (TypeError, ValueError):
        number = np.array([])
    if number.shape != shape or not np.isfinite(number).all():
        line = f" (line {item.line})" if item.line else ""
        label = str(item.label)[:50]
        raise UserError(f"{folder / item.name}: the target {label} is not a number{line}.")
    return number


def _further_number(folder: Path, item: Item, column: str) -> float:
    value: Any = item.numbers.get(column)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        line = f" (line {item.line})" if item.line else ""
        shown = str(value)[:50] or "empty"
        raise UserError(
            f"{folder / item.name}: the column {column} is {shown}, which is not a number{line}. "
            "Write a number there, or leave the column out of the command."
        )
    return number
