"""The parquet files of a Hugging Face image data set: encoded images, and labels as class names or numbers."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from lockstep.data.decoding import CorruptImage
from lockstep.data.node_cache import Content, cached, require_space
from lockstep.data.sharded_datamodule import ShardedDataModule
from lockstep.runs.errors import UserError

ENCODED, ROWS = "encoded.bin", 64  # rows read at a time
HUB = "hf://"


class ParquetDataModule(ShardedDataModule):
    """A parquet file has no access to single images: the encoded images are copied once into the node's cache.

    Args:
        root: as of ShardedDataModule, or hf://datasets/OWNER/NAME: the files of the Hugging Face hub.
        image_column: of encoded images, of structs with `bytes` or `path`, or of paths; None: the column that is
            declared as images, or the only one that can be.
        label_column: None: the column that is declared as a class label, or `label`, or `labels`.
        options: as of ShardedDataModule; `group` may name a column.
    """

    suffix, kind = ".parquet", "parquet"

    def __init__(
        self, *, root: str | Path | None = None, image_column: str | None = None, label_column: str | None = None,
        name: str = "parquet", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(root="." if str(root).startswith(HUB) else root, name=name, **options)
        self._image_column, self._label_column = image_column, label_column
        if str(root).startswith(HUB):
            self._root = self._from_hub(str(root))

    def shard_options(self) -> list[Any]:
        return [self._image_column, self._label_column, self.group]

    def read_shard(self, path: Path, folder: Path) -> Content:
        try:
            with parquet.ParquetFile(path) as file, (folder / ENCODED).open("wb") as out:
                columns = Columns(path, file.schema_arrow, self._image_column, self._label_column, self.group)
                require_space(folder, path.stat().st_size)
                sizes: list[int] = []
                labels: list[str] = []
                groups: list[str] = []
                for batch in file.iter_batches(ROWS, columns=columns.wanted):
                    for image in batch.column(columns.image).to_pylist():
                        sizes.append(out.write(columns.encoded(image, len(sizes))))
                    for label in batch.column(columns.label).to_pylist():
                        labels.append(columns.class_of(label, len(labels)))
                    groups += [str(value) for value in batch.column(columns.group).to_pylist()] if columns.group else []
        except pa.ArrowException as error:
            raise CorruptImage(f"is no parquet file, or cut off ({' '.join(str(error).split())[:200]})") from None
        except OSError as error:
            raise CorruptImage(f"cannot be read ({error})") from None
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + size)
        names = [f"row {i}" for i in range(len(sizes))]
        return {
            "names": names, "labels": labels, "start": ends[:-1], "size": sizes, "groups": groups, "data": ENCODED,
            "left_out": {},
        }  # fmt: skip

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


class Columns:
    """Which columns hold the images, labels and groups: as stated, else as the file declares them.

    Raises:
        UserError: there is none, or several.
    """

    def __init__(self, path: Path, schema: pa.Schema, image: str | None, label: str | None, group: str | None) -> None:
        self._path, self._schema = path, schema
        features = _declared(schema)
        images = [name for name in schema.names if _type_of(features, name) == "Image"]
        labels = [name for name in schema.names if _type_of(features, name) == "ClassLabel"]
        labels = labels or [name for name in ("label", "labels") if name in schema.names]
        self.image = self._one(
            "image_column", image, images or [field.name for field in schema if _holds_images(field)]
        )
        self.label = self._one("label_column", label, labels)
        self.group = group if group in schema.names else None
        if not (_holds_images(schema.field(self.image)) or _is_text(schema.field(self.image).type)):
            raise UserError(
                f"{path}: the column {self.image} holds no encoded images, but {schema.field(self.image).type}."
            )
        names = features.get(self.label, {}).get("names") if _type_of(features, self.label) == "ClassLabel" else None
        self.names = [str(name) for name in names] if isinstance(names, list) else []
        self.wanted = list(dict.fromkeys([self.image, self.label, *([self.group] if self.group else [])]))

    def encoded(self, image: Any, row: int) -> bytes:
        """The bytes of one image, which may lie in a file beside the table."""
        value = image
        if isinstance(image, Mapping):
            value = image.get("bytes") or image.get("path")
        if isinstance(value, str):
            file = self._path.parent / value
            if not file.is_file():
                raise UserError(f"{self._path}, row {row}: {self.image} names {value}, and there is no file {file}.")
            return file.read_bytes()
        if not value:
            raise UserError(f"{self._path}, row {row}: {self.image} holds no image.")
        return value

    def class_of(self, value: Any, row: int) -> str:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and self.names and 0 <= value < len(self.names):
            return self.names[value]
        if (isinstance(value, str) and value.strip()) or (isinstance(value, int) and value >= 0 and not self.names):
            return str(value)
        unlabelled = (
            " Images without labels test nothing: data.test='*val*' leaves them out." if value in (None, -1) else ""
        )
        raise UserError(f"{self._path}, row {row}: {self.label} is {str(value)[:50]}, which is no class.{unlabelled}")

    def _one(self, option: str, given: str | None, found: list[str]) -> str:
        names = self._schema.names
        if given is not None and given in names:
            return given
        if given is None and len(found) == 1:
            return found[0]
        wrong = f"has no column {given}" if given is not None else "does not say which column that is"
        raise UserError(f"data.{option}: {self._path} {wrong}; give one of {', '.join(found or names[:20])}.")


def _declared(schema: pa.Schema) -> Mapping[str, Any]:
    """What Hugging Face's datasets wrote about the columns, if they wrote this file."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _type_of(features: Mapping[str, Any], name: str) -> str | None:
    feature = features.get(name)
    return feature.get("_type") if isinstance(feature, dict) else None


def _holds_images(field: pa.Field) -> bool:
    kind = field.type
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0 or kind.get_field_index("path") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
