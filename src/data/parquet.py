"""The parquet files of a Hugging Face image data set: encoded images, and labels as class names or numbers."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import parquet

from data.shards import ShardedDataModule
from lockstep.data.decoding import CorruptImage
from lockstep.data.node_cache import Content, cached, require_space
from lockstep.runs.errors import UserError

ENCODED, ROWS = "encoded.bin", 64  # rows read at a time
HUB = "hf://"


class Columns(NamedTuple):
    """The names of columns; class_names: of labels that are numbers, as the file declares them."""

    image: str
    labels: list[str]
    group: str | None
    class_names: list[str]


class ParquetDataModule(ShardedDataModule):
    """A parquet file has no access to single images: the encoded images are copied once into the node's cache.

    Args:
        root: as of ShardedDataModule, or hf://datasets/OWNER/NAME: the files of the Hugging Face hub.
        image_column: of encoded images, of structs with `bytes` or `path`, or of paths; None: the column that is
            declared as images, or the only one that can be.
        label_column: None: the column that is declared as a class label, or `label`, or `labels`.
        label_columns: several columns of numbers, mostly 0 and 1, in place of label_column.
        options: as of ShardedDataModule; `group` may name a column.
    """

    suffix, kind = ".parquet", "parquet"

    def __init__(
        self, *, root: str | Path | None = None, image_column: str | None = None, label_column: str | None = None,
        label_columns: Sequence[str] | None = None, name: str = "parquet", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(root="." if str(root).startswith(HUB) else root, name=name, **options)
        self._image_column, self._label_column = image_column, label_column
        self.label_columns = list(label_columns or [])
        if str(root).startswith(HUB):
            self._root = self._from_hub(str(root))

    def shard_options(self) -> list[Any]:
        return [self._image_column, self._label_column, self.label_columns, self.target, self.group]

    def read_shard(self, path: Path, folder: Path) -> Content:
        items: list[tuple[str, Any, int, int, str | None]] = []
        try:
            with parquet.ParquetFile(path) as file, (folder / ENCODED).open("wb") as out:
                columns = self._columns_of(path, file.schema_arrow)
                require_space(folder, path.stat().st_size)
                wanted = dict.fromkeys([columns.image, *columns.labels, *filter(None, [columns.group])])
                for batch in file.iter_batches(ROWS, columns=list(wanted)):
                    for row in batch.to_pylist():
                        where, start = f"row {len(items)}", out.tell()
                        image = _encoded(row[columns.image], f"{path}, {where}", columns.image, path.parent)
                        group = str(row[columns.group]) if columns.group else None
                        label = self._label_of(row, f"{path}, {where}", columns)
                        items.append((where, label, start, out.write(image), group))
        except pa.ArrowException as error:
            raise CorruptImage(f"is no parquet file, or cut off ({' '.join(str(error).split())[:200]})") from None
        except OSError as error:
            raise CorruptImage(f"cannot be read ({error})") from None
        return {"items": items, "data": ENCODED, "left_out": {}}

    def _columns_of(self, path: Path, schema: pa.Schema) -> Columns:
        """Return the columns as stated, else as the file declares them.

        Raises:
            UserError: there is none, or several.
        """
        try:  # what Hugging Face's datasets wrote about the columns, if they wrote this file
            declared = dict(json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"])
        except (KeyError, TypeError, ValueError):
            declared = {}
        kinds = {name: each.get("_type") for name, each in declared.items() if isinstance(each, dict)}

        def chosen(option: str, given: str | None, found: list[str]) -> str:
            if given is not None and given in schema.names:
                return given
            if given is None and len(found) == 1:
                return found[0]
            wrong = "does not say which column that is" if given is None else f"has no column {given}"
            raise UserError(f"data.{option}: {path} {wrong}; give one of {', '.join(found or schema.names[:20])}.")

        images = [name for name in schema.names if kinds.get(name) == "Image"]
        images = images or [field.name for field in schema if _holds_images(field.type)]
        labels = [name for name in schema.names if kinds.get(name) == "ClassLabel"]
        labels = labels or [name for name in ("label", "labels") if name in schema.names]
        image = chosen("image_column", self._image_column, images)
        if not (_holds_images(kind := schema.field(image).type) or "string" in str(kind)):
            raise UserError(f"{path}: the column {image} holds no encoded images, but {kind}.")
        group = self.group if self.group in schema.names else None
        if self.label_columns:
            return Columns(image, [chosen("label_columns", name, []) for name in self.label_columns], group, [])
        label = chosen("label_column", self._label_column, labels)
        class_names = declared[label].get("names") if kinds.get(label) == "ClassLabel" else []
        return Columns(image, [label], group, [str(name) for name in class_names or []])

    def _label_of(self, row: Mapping[str, Any], where: str, columns: Columns) -> Any:
        values = [row[name] for name in columns.labels]
        if self.target == "class" and not self.label_columns:
            return _class_of(values[0], f"{where}: {columns.labels[0]}", columns.class_names)
        try:
            numbers = [float(value) for value in values]
        except (TypeError, ValueError):
            raise UserError(f"{where}: the target {str(values)[:50]} is no number.") from None
        return numbers if self.label_columns else numbers[0]

    def _from_hub(self, address: str) -> Path:
        """Copy the parquet files of a data set on the hub into the cache, and return the folder of the copy.

        Raises:
            UserError: there are none, or the hub cannot be reached.
        """
        from huggingface_hub import HfFileSystem

        try:
            hub = HfFileSystem()
            found = {
                path: facts for path, facts in hub.find(address, detail=True).items() if path.endswith(self.suffix)
            }
        except Exception as error:  # of the network, the hub and its authentication
            raise UserError(f"data.root={address} cannot be listed ({type(error).__name__}: {error}).") from None
        if not found:
            raise UserError(
                f"data.root={address} holds no {self.suffix} file: give a data set that is stored as parquet."
            )
        base = os.path.commonpath([os.path.dirname(path) for path in found])

        def copy(folder: Path) -> Content:
            for path, facts in found.items():
                target = folder / os.path.relpath(path, base).replace("/", "-")
                hub.get_file(path, str(target))
                if target.stat().st_size != facts["size"]:
                    raise UserError(f"{address}: {path} was cut off on the way; start again.")
            return {}

        folder = self.cache_folder([address, sorted((path, facts["size"]) for path, facts in found.items())])
        cached(folder, copy)
        return folder


def _encoded(image: Any, where: str, column: str, folder: Path) -> bytes:
    """Return the bytes of one image, which may lie in a file beside the table."""
    value = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
    if isinstance(value, str):
        if not (folder / value).is_file():
            raise UserError(f"{where}: {column} names {value}, and there is no file {folder / value}.")
        return (folder / value).read_bytes()
    if not value:
        raise UserError(f"{where}: {column} holds no image.")
    return value


def _class_of(value: Any, where: str, names: list[str]) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and 0 <= value < len(names):
        return names[value]
    if (isinstance(value, str) and value.strip()) or (isinstance(value, int) and value >= 0 and not names):
        return str(value)
    hint = " Images without labels test nothing: data.test='*val*' leaves them out." if value in (None, -1) else ""
    raise UserError(f"{where} is {str(value)[:50]}, which is no class.{hint}")


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 or kind.get_field_index("path") >= 0
    return "binary" in str(kind)
