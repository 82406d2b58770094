"""Images in parquet files, or in files that these name."""

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.columns import find_column, find_number_columns, parse_split_column, require_column
from data.shards import Shards, identify_file
from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.node_cache import Metadata
from lockstep.process.errors import UserError

ENCODED = "encoded.bin"
# The rows of a file that are read at a time.
ROWS = 64


@dataclass
class ParquetColumns:
    """The columns of a parquet file that are read.

    Args:
        class_names: the names that the file declares; [] if it declares none.
        group, split: "" if there is no such column.
        numbers: see `find_number_columns`.
    """

    image: str
    labels: list[str]
    class_names: list[str]
    group: str
    split: str
    numbers: dict[str, str]

    @property
    def all(self) -> list[str]:
        optional_columns = filter(None, (self.group, self.split))
        return sorted({self.image, *self.labels, *optional_columns, *self.numbers.values()})


@dataclass
class CopiedRows:
    """The facts beside the images that were copied out of a parquet file.

    Args:
        items: the `items` of ReadShard.
        split_names: the names of their splits, if a column says them.
        files: the `files` of ReadShard. A row may name the file of its image.
        unlabelled: the names of rows without a label.
    """

    items: list[list[Any]] = field(default_factory=list)
    split_names: list[str] = field(default_factory=list)
    files: list[list[Any] | None] = field(default_factory=list)
    unlabelled: list[str] = field(default_factory=list)


class ParquetDataModule(ListedDataModule):
    """Images in parquet files. Each node copies them once into its cache, to read single images.

    A cell of the image column is an encoded image, a path, or a struct with `bytes` or `path`.
    configs/data/parquet.yaml explains the options. `group` may name a column.
    """

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        image_column: str | None = None,
        label_column: str | None = None,
        label_columns: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._image_column = image_column
        self._label_column = label_column
        self._label_columns = list(label_columns or [])
        cache_key_options = [
            image_column,
            label_column,
            self._label_columns,
            self.target,
            self.group,
        ]
        if self.splits_option is False:
            cache_key_options.append("splits=false")
        if self.column_options:
            cache_key_options.append(list(self.column_options))
        self._shards = Shards(self, root, ".parquet", self._read_shard, cache_key_options)

    def list_images(self) -> ImageList:
        return self._shards.list_images(self._label_columns)

    def _read_shard(self, path: Path, folder: Path) -> Metadata:
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(path) as file:
                columns = self._find_columns(path, file.schema_arrow)
                batches = file.iter_batches(ROWS, columns=columns.all)
                rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
                copied = self._copy_rows(path, rows, columns, folder / ENCODED)
        except ArrowException as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path} is not a parquet file, or is cut off ({reason}): repair or remove it."
            ) from None
        splits = []
        if self.splits_option is not False:
            locations = [f"{path}, {item[0]}" for item in copied.items]
            splits = parse_split_column(copied.split_names, columns.split, locations.__getitem__)
        left_out = {"rows without a label": copied.unlabelled} if copied.unlabelled else {}
        return {
            "items": copied.items,
            "data": ENCODED,
            "files": copied.files if any(copied.files) else [],
            "left_out": left_out,
            "splits": splits,
        }

    def _copy_rows(
        self,
        path: Path,
        rows: Iterable[Mapping[str, Any]],
        columns: ParquetColumns,
        destination: Path,
    ) -> CopiedRows:
        """Write the encoded images, one after the other, into the file `destination`."""
        copied = CopiedRows()
        with destination.open("wb") as out:
            for row_number, row in enumerate(rows):
                name = f"row {row_number}"
                label = self._read_label(row, columns, f"{path}, {name}")
                if label is None and self.target == "class":
                    copied.unlabelled.append(name)
                    continue
                location = f"{path}, {name}: {columns.image}"
                image = _get_bytes_or_file(row[columns.image], location, path.parent)
                file = None
                if isinstance(image, Path):
                    file = identify_file(image)
                    image = image.read_bytes()
                start = out.tell()
                size = out.write(image)
                group = _read_group(row, columns.group, f"{path}, {name}")
                numbers = {key: _to_json(row[column]) for key, column in columns.numbers.items()}
                copied.items.append([name, label, start, size, group, numbers])
                copied.files.append(file)
                if columns.split:
                    copied.split_names.append(str(row[columns.split]))
        return copied

    def _read_label(self, row: Mapping[str, Any], columns: ParquetColumns, location: str) -> Any:
        """Return the label of a row; None if its class is missing."""
        if self._label_columns:
            return _to_json([row[column] for column in columns.labels])
        value = row[columns.labels[0]]
        if self.target != "class":
            return _to_json(value)
        if value in (None, -1):
            return None
        return _name_class(value, f"{location}: {columns.labels[0]}", columns.class_names)

    def _find_columns(self, path: Path, schema: Any) -> ParquetColumns:
        """Return the columns, which the options name or the file declares."""
        types = {column.name: str(column.type) for column in schema}
        features = _read_hugging_face_features(schema, types)
        image = self._find_image_column(path, types, features)
        group = find_column(list(types), str(self.group)) if self.group else ""
        split = find_column(list(types), "split")
        numbers = find_number_columns(self, path, list(types))
        if self._label_columns:
            labels = [
                require_column(path, list(types), name, "label_columns")
                for name in self._label_columns
            ]
            return ParquetColumns(image, labels, [], group, split, numbers)
        classes = _list_declared(features, "ClassLabel")
        column = self._label_column or (classes[0] if len(classes) == 1 else "label")
        label = require_column(path, list(types), column, "label_column")
        class_names = []
        if label in classes:
            class_names = [str(name) for name in features[label].get("names") or ()]
        return ParquetColumns(image, [label], class_names, group, split, numbers)

    def _find_image_column(
        self, path: Path, types: Mapping[str, str], features: Mapping[str, Mapping[str, Any]]
    ) -> str:
        image_columns = [
            name for name, kind in types.items() if "binary" in kind or "path: string" in kind
        ]
        candidates = _list_declared(features, "Image") or image_columns
        if self._image_column:
            candidates = [self._image_column]
        if len(candidates) != 1:
            column_names = ", ".join(candidates or list(types)[:20])
            raise UserError(
                f"{path}: the column of the images is not clear. Give data.image_column= one of "
                f"{column_names}."
            )
        image = require_column(path, list(types), candidates[0], "image_column")
        if image not in image_columns and "string" not in types[image]:
            raise UserError(
                f"{path}: the column {image} holds no encoded images, but {types[image]}."
            )
        return image


def _read_hugging_face_features(schema: Any, types: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what Hugging Face's datasets has written about the columns; {} if it has not."""
    with suppress(KeyError, TypeError, ValueError):
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: feature
            for name, feature in features.items()
            if isinstance(feature, dict) and name in types
        }
    return {}


def _list_declared(features: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    return [name for name, feature in features.items() if feature.get("_type") == kind]


def _get_bytes_or_file(image: Any, location: str, folder: Path) -> bytes | Path:
    """Return the bytes of an image, or the path of its file beside the table."""
    value = image
    if isinstance(image, Mapping):
        value = image.get("bytes") or image.get("path")
    if isinstance(value, str):
        # Path.is_file raises for a name that is too long.
        if not os.path.isfile(folder / value):
            raise UserError(
                f"{location} names {value[:100]}, and there is no file of that name in {folder}."
            )
        return folder / value
    if not value or not isinstance(value, bytes):
        kind = f", but a {type(value).__name__}" if value else ""
        raise UserError(f"{location} holds no image{kind}.")
    return value


def _read_group(row: Mapping[str, Any], column: str, location: str) -> str | None:
    """Return the group of a row of a parquet file; None without a column of groups.

    Raises:
        UserError: the cell of the column is empty.
    """
    if not column:
        return None
    if row[column] is None:
        raise UserError(f"{location}: {column} is empty, and data.group needs it for each image.")
    return str(row[column])


def _to_json(value: Any) -> Any:
    """Return a value for JSON: a number as it is, and anything else, such as a decimal, as text."""
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return value if isinstance(value, int | float) else str(value)


def _name_class(value: Any, location: str, names: list[str]) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and 0 <= value < (len(names) or math.inf):
        return names[value] if names else str(value)
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(f"{location} is {str(value)[:50]}, which is not a class.")
