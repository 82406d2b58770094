"""The source of encoded images in files or shards, which are listed before any image is opened."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.content_hash import hash_files
from lockstep.data.decoding import CorruptImage, get_size, open_mask
from lockstep.data.listing import (
    Item,
    LeftOut,
    describe_alike_names,
    describe_counts,
    describe_merged_labels,
    hash_json,
    sort_classes,
    tidy_labels,
)
from lockstep.data.reading import Reading
from lockstep.data.source import Source
from lockstep.data.targets import number_pixels, to_masks
from lockstep.process.errors import UserError


class ImageList(Source):
    """A list of n images: first those to train on, then validation, then test.

    Attributes:
        target_values: (n,) int64 classes, (n,) float32 numbers or (n, C) float32 labels. With masks
            they are zeros. A label that is not known is nan.
        reading: how a file becomes pixels.

    Args:
        folder: names and files are relative to it.
        target: the meaning of labels: class, number, or mask, a path relative to `folder`.
        label_columns: the names of the labels, if an image has several.
        unknown: the number in several labels that means "not known"; None: there is none.
        left_out: names of skipped files by reason, for the log.
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
            raise UserError(f"{folder} has no images (left out: {describe_counts(self.left_out)}).")
        items = sorted(items, key=lambda item: item.split)
        self._store(items)

        self.columns = {}
        for column in items[0].column_values:
            numbers = [_parse_number(folder, item, column) for item in items]
            self.columns[column] = np.array(numbers)
        self._set_targets(items, target, label_columns)
        if unknown is not None and label_columns:
            self.target_values[self.target_values == unknown] = np.nan

    def _set_targets(
        self, items: Sequence[Item], target: str, label_columns: Sequence[str]
    ) -> None:
        """Set the targets, which are numbers for the labels of the items, or their masks."""
        labels = [item.label for item in items]
        self._masks = _encode_names([])
        self.class_names = list(label_columns)
        if target == "mask":
            self.has_grey_levels = True
            self.mask_names = [""]
            self.target_values = np.zeros(len(items), np.int64)
            self.targets = {}
            self._masks = _encode_names(labels)
            return
        if label_columns or target == "number":
            self.target_values = _parse_labels(self.folder, items, len(label_columns))
        else:
            self.target_values = self._number_classes(labels)
            self.warnings += describe_alike_names(self.class_names)
        self.targets = {"": self.target_values}

    def _store(self, items: Sequence[Item]) -> None:
        """Store the items in arrays, which worker processes share with this one.

        Each worker would copy a list of strings as it reads it.
        """
        self._names = _encode_names([item.name for item in items])
        self.split_ids = np.array([item.split for item in items], np.int8)
        self.num_bytes = _collect(items, "num_bytes")
        self._line = _collect(items, "line")
        self._mtime = _collect(items, "mtime")
        self._offset = _collect(items, "offset")
        # The distinct shards, and the number of each image's shard. "" stands for its own file.
        shards = [item.shard or "" for item in items]
        self._shards, self._shard_numbers = np.unique(shards, return_inverse=True)
        groups = [item.group for item in items]
        if None not in groups:
            self.groups = np.unique(np.array(groups), return_inverse=True)[1]
        names = [os.fsdecode(name) for name in self._names]
        self.list_hash = hash_json([names, self.num_bytes.tolist()])

    def _number_classes(self, labels: Sequence[str]) -> np.ndarray:
        """Set the class names, and return (n,) int64 classes."""
        tidy = tidy_labels(set(labels))
        self.warnings += describe_merged_labels(tidy)
        self.class_names = sort_classes(tidy.values())
        number_of = {name: number for number, name in enumerate(self.class_names)}
        return np.array([number_of[tidy[label]] for label in labels], np.int64)

    def name(self, i: int) -> str:
        return os.fsdecode(self._names[i])

    def location(self, i: int) -> str:
        line = int(self._line[i])
        return f"{self.name(i)} (line {line})" if line else self.name(i)

    def path(self, i: int) -> str:
        """Return the image's name below the folder of the list."""
        return str(self.folder / self.name(i))

    def mask_path(self, i: int) -> Path:
        return self.folder / os.fsdecode(self._masks[i])

    def read_bytes(self, i: int, first: int = 0, count: int | None = None) -> bytes:
        """Return the encoded image, or `count` of its bytes from `first` on.

        Raises:
            CorruptImage: it cannot be read, or the file has become shorter.
        """
        file = self._shard(i) or self.path(i)
        count = int(self.num_bytes[i]) if count is None else count
        try:
            with open(file, "rb") as opened:
                opened.seek(int(self._offset[i]) + first)
                data = opened.read(count)
        except OSError as error:
            raise CorruptImage(f"{self.path(i)} cannot be read ({error.strerror})") from None
        if len(data) < count:
            raise CorruptImage(f"{self.path(i)} is shorter than when it was listed")
        return data

    def file(self, i: int) -> Path | bytes:
        """Return the path of an image's own file, or its bytes if it lies in a shard."""
        return self.read_bytes(i) if self._shard(i) else Path(self.path(i))

    def _shard(self, i: int) -> str:
        """Return the path of the shard that holds an image; "": it has a file of its own."""
        return self._shards[self._shard_numbers[i]]

    def read_mask(self, i: int) -> np.ndarray:
        """Return the grey level of each pixel, (height, width) uint8."""
        return open_mask(self.mask_path(i), self.reading.max_megapixels)

    def open(self, i: int) -> tuple[Any, ...]:
        name = self.path(i)
        image = self.reading.open(self.read_bytes(i), name)
        if not self.mask_names:
            return (image,)
        mask = self.read_mask(i)
        width, height = get_size(image)
        if mask.shape != (height, width):
            raise CorruptImage(
                f"the mask of {name} has {mask.shape[1]}×{mask.shape[0]} "
                f"pixels and its image {width}×{height}"
            )
        return image, *to_masks([number_pixels(mask, self.grey_levels)])

    @property
    def identity(self) -> str:
        """A hash that changes with any name, size, time, target or split."""
        masks = []
        for i in range(len(self._masks)):
            stat = os.stat(self.mask_path(i))
            masks.append((os.fsdecode(self._masks[i]), stat.st_size, stat.st_mtime_ns))
        arrays = [array.tolist() for array in (self._mtime, self.target_values, self.split_ids)]
        return hash_json([self.list_hash, str(self.folder), self.class_names, masks, arrays])

    def hash(self) -> str:
        return hash_files(self)


def _collect(items: Sequence[Item], name: str) -> np.ndarray:
    return np.array([getattr(item, name) for item in items], np.int64)


def _encode_names(names: Sequence[str]) -> np.ndarray:
    return np.array([os.fsencode(name) for name in names], np.bytes_)


def _parse_labels(folder: Path, items: Sequence[Item], columns: int) -> np.ndarray:
    """Return (n,) float32, or (n, columns) if an item has several labels."""
    shape = (columns,) if columns else ()
    return np.array([_parse_label(folder, item, shape) for item in items], np.float32)


def _parse_label(folder: Path, item: Item, shape: tuple[int, ...]) -> np.ndarray:
    try:
        number = np.asarray(item.label, np.float32)
    except (TypeError, ValueError):
        number = np.array([])
    if number.shape != shape or not np.isfinite(number).all():
        line = f" (line {item.line})" if item.line else ""
        label = str(item.label)[:50]
        raise UserError(f"{folder / item.name}: the target {label} is not a number{line}.")
    return number


def _parse_number(folder: Path, item: Item, column: str) -> float:
    value: Any = item.column_values.get(column)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        line = f" (line {item.line})" if item.line else ""
        text = str(value)[:50] or "empty"
        raise UserError(
            f"{folder / item.name}: the column {column} is {text}, which is not a number{line}. "
            "Write a number there, or leave the column out of the command."
        )
    return number
