"""The parquet files of a Hugging Face image data set: images as encoded bytes, labels as class names or numbers."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data.image_set import fingerprint
from lockstep.data.node_cache import Content, cached, file_identity, require_space
from lockstep.data.sharded_datamodule import BadShard, Shard, ShardedDataModule
from lockstep.runs.errors import UserError
from lockstep.runs.foreign_files import NotReadable, parse_json

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES, SIZES, CODES = "encoded.bin", "sizes.npy", "codes.npy"
MAX_GROUP_BYTES = 2**32  # of a row group, unpacked: it has to fit in memory
ROWS = 64  # read at a time


class ParquetDataModule(ShardedDataModule):
    """A parquet file cannot be read at one image: its images are copied once, as they are, into the node's cache.

    Args:
        image_column: of encoded images, or of structs with `bytes`; None: the one that is declared as images, or the
            only one that can be.
        label_column: of whole numbers, with names where the file declares them, or of text; None: the one that is
            declared as a class label, or `label`, or `labels`.
        options: as of ShardedDataModule.
    """

    suffix, group = ".parquet", "parquet"

    def __init__(
        self, *, image_column: str | None = None, label_column: str | None = None, name: str = "parquet", **options: Any
    ) -> None:
        super().__init__(name=name, **options)
        self._image_column, self._label_column = image_column, label_column
        self._class_order: list[str] = []

    def listed_from(self) -> list[Any]:
        return [self._image_column, self._label_column, *super().listed_from()]

    def class_order(self) -> list[str] | None:
        return self._class_order or None

    def read_shard(self, path: Path) -> Shard:
        key = fingerprint([*file_identity(path), self._image_column, self._label_column])
        folder = self.cache_dir / f"{self.name}-unpacked-{key[:16]}"
        facts = cached(folder, lambda part: self._unpack(path, part))
        self._class_order = facts["names"] or self._class_order
        sizes, words = np.load(folder / SIZES), [facts["words"][code] for code in np.load(folder / CODES)]
        rows = [f"row {i}" for i in range(len(words))]
        return Shard(folder / IMAGES, words, rows, np.cumsum(sizes) - sizes, sizes)

    def _unpack(self, path: Path, part: Path) -> Content:
        """Images behind one another, their sizes, and which of the words in the content each label is."""
        import pyarrow as pa
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(path) as file:
                columns = Columns(path, file.schema_arrow, self._image_column, self._label_column)
                require_space(part, _check_groups(file.metadata))
                sizes: list[int] = []
                words: list[str] = []
                with (part / IMAGES).open("wb") as out:
                    for batch in file.iter_batches(ROWS, columns=[columns.image_leaf, columns.label]):
                        for data in _encoded(batch.column(columns.image)):
                            if not data:
                                raise UserError(
                                    f"{path}, row {len(sizes)}: {columns.image} holds no image (a path alone is not "
                                    "followed)."
                                )
                            sizes.append(out.write(data))
                        words += columns.words(batch.column(columns.label), len(words))
        except pa.ArrowException as error:
            raise BadShard(f"is no parquet file, or cut off ({_short(error)})") from None
        except OSError as error:
            raise BadShard(f"cannot be read ({_short(error)})") from None
        distinct = {word: code for code, word in enumerate(dict.fromkeys(words))}
        np.save(part / SIZES, np.array(sizes, np.int64))
        np.save(part / CODES, np.array([distinct[word] for word in words], np.int64))
        return {"words": list(distinct), "names": columns.names}


class Columns:
    """Which columns hold the images and the labels, by the names given, or by what the file declares.

    Raises:
        UserError: there are none, or several.
    """

    def __init__(self, path: Path, schema: "pa.Schema", image: str | None, label: str | None) -> None:
        self._path, self._schema = path, schema
        features = _declared(schema)
        images = [name for name in schema.names if _type_of(features, name) == "Image"]
        labels = [name for name in schema.names if _type_of(features, name) == "ClassLabel"]
        labels = labels or [name for name in ("label", "labels") if name in schema.names]
        self.image = self._one("image_column", image, images or [f.name for f in schema if _holds_images(f.type)])
        self.label = self._one("label_column", label, labels)
        if not _holds_images(schema.field(self.image).type):
            raise UserError(
                f"{path}: the column {self.image} holds no encoded images, but {schema.field(self.image).type}."
            )
        names = features.get(self.label, {}).get("names") if _type_of(features, self.label) == "ClassLabel" else None
        self.names = [str(name) for name in names] if isinstance(names, list) else []

    @property
    def image_leaf(self) -> str:
        return f"{self.image}.bytes" if _is_struct(self._schema.field(self.image).type) else self.image

    def words(self, labels: "pa.Array", first: int) -> list[str]:
        """The class of each row; `first` is the number of the first one."""
        return [self._word(value, first + i) for i, value in enumerate(labels.to_pylist())]

    def _word(self, value: Any, row: int) -> str:
        if isinstance(value, int) and self.names and 0 <= value < len(self.names):
            return self.names[value]
        if isinstance(value, str) and value or isinstance(value, int) and value >= 0 and not self.names:
            return str(value)
        unlabelled = (
            " Images without labels test nothing: data.test='*val*' data.val=null." if value in (None, -1) else ""
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


def _declared(schema: "pa.Schema") -> Mapping[str, Any]:
    """What Hugging Face's datasets wrote of the columns, if they wrote this file."""
    try:
        features = parse_json((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, NotReadable):
        return {}
    return features if isinstance(features, dict) else {}


def _type_of(features: Mapping[str, Any], name: str) -> str | None:
    feature = features.get(name)
    return feature.get("_type") if isinstance(feature, dict) else None


def _is_struct(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0


def _holds_images(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    kind = kind.field("bytes").type if _is_struct(kind) else kind
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _encoded(column: "pa.Array") -> Iterator[Any]:
    """The bytes of each image, not copied; None where there are none."""
    for value in column.field("bytes") if _is_struct(column.type) else column:
        yield value.as_buffer()


def _check_groups(metadata: Any) -> int:
    """Bytes of all row groups, unpacked.

    Raises:
        BadShard: one of them is too large to read.
    """
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    if max(sizes, default=0) > MAX_GROUP_BYTES:
        raise BadShard(f"has a row group of {max(sizes) / 2**30:.1f} GiB, more than {MAX_GROUP_BYTES / 2**30:.0f}")
    return sum(sizes)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
