"""Images in tar shards, as WebDataset has them: key.jpg beside key.cls or key.json."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.image_tree import SUFFIXES
from lockstep.data.sharded_datamodule import BadShard, Shard, ShardedDataModule
from lockstep.data.tar_index import BadArchive, Member, members
from lockstep.data.tar_shards import read_index
from lockstep.runs.errors import UserError
from lockstep.runs.foreign_files import NotReadable, parse_json

MAX_LABEL_BYTES = 2**16  # of a .cls or .json file
PARTS = ("start", "size")


class WebDatasetDataModule(ShardedDataModule):
    """Shards are listed by their index (src/shards.py writes one) or their headers, and read in place, never unpacked.

    Args:
        label_field: of key.json; None: key.cls holds the label.
        options: as of ShardedDataModule.
    """

    suffix, group = ".tar", "webdataset"

    def __init__(self, *, label_field: str | None = None, name: str = "webdataset", **options: Any) -> None:
        super().__init__(name=name, **options)
        self._label_field = label_field

    def listed_from(self) -> list[Any]:
        return [self._label_field, *super().listed_from()]

    def read_shard(self, path: Path) -> Shard:
        try:
            indexed = read_index(path)
        except BadArchive as error:
            raise BadShard(str(error)) from None
        if indexed is None:
            return self._read_headers(path)
        if self._label_field:
            raise UserError(f"{path} has an index, with labels of its own: leave data.label_field out.")
        start, size = (np.array([getattr(image, part) for image in indexed], np.int64) for part in PARTS)
        return Shard(path, [image.word for image in indexed], [image.name for image in indexed], start, size)

    def _read_headers(self, path: Path) -> Shard:
        images: dict[str, Member] = {}
        labels: dict[str, Member] = {}
        wanted = "cls" if self._label_field is None else "json"
        try:
            for member in members(path):
                folder, _, name = member.name.rpartition("/")
                stem, _, ending = name.partition(".")
                key = f"{folder}/{stem}"
                if f".{ending.lower()}" in SUFFIXES:
                    if key in images:
                        raise UserError(f"{path}: {images[key].name} and {member.name} are of one sample.")
                    images[key] = member
                elif ending == wanted:
                    labels[key] = member
            with path.open("rb") as file:
                words = [self._word(path, file.fileno(), image, labels.get(key)) for key, image in images.items()]
        except BadArchive as error:
            raise BadShard(str(error)) from None
        except OSError as error:
            raise BadShard(f"cannot be read ({error.strerror})") from None
        found = list(images.values())
        start, size = (np.array([getattr(image, part) for image in found], np.int64) for part in PARTS)
        return Shard(path, words, [image.name for image in found], start, size)

    def _word(self, path: Path, descriptor: int, image: Member, label: Member | None) -> str:
        where = f"{path}: {image.name}"
        if label is None:
            other = "" if self._label_field else " (where a key.json holds the label: data.label_field=FIELD)"
            raise UserError(f"{where} has no {'.json' if self._label_field else '.cls'} file beside it{other}.")
        if label.size > MAX_LABEL_BYTES:
            raise UserError(f"{path}: {label.name} has {label.size} bytes, too many for a label.")
        data = os.pread(descriptor, label.size, label.start)
        try:
            value = data.decode().strip() if self._label_field is None else parse_json(data)[self._label_field]
        except (UnicodeDecodeError, NotReadable, KeyError, TypeError) as error:
            raise UserError(f"{path}: {label.name} holds no label ({type(error).__name__}: {error}).") from None
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise UserError(f"{path}: {label.name} holds no label: {str(value)[:50]!r} is no text and no whole number.")
        return str(value)
