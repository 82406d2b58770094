"""Images that a table lists: a CSV file that names their files, or parquet files that hold them."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from data.csv_file import CSVTable, read_csv
from data.shards import Shards, identity_of
from lockstep.data.decoding import SUFFIXES
from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import (
    SPLIT_OF,
    SPLITS,
    TRAIN,
    Item,
    LeftOut,
    group_of,
    local_root,
)
from lockstep.data.node_cache import Content
from lockstep.process.errors import UserError

# Names that are tried where a table has no column path, label or split.
ALIASES = {
    "path": ("file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("labels", "class", "class_name", "target", "category"),
    "split": ("set", "subset", "partition", "fold"),
}
# A column of 0 and 1 that says which rows are of one split.
FLAG = re.compile("is_?(train|valid|val|validation|dev|test)(ing)?(_[a-z_]+)?", re.IGNORECASE)
FOLD = re.compile("(k|cv)?_?folds?(_?id)?", re.IGNORECASE)
ENCODED = "encoded.bin"
LONGEST_NAME = 200  # characters of a path in a message
ROWS = 64  # rows of a parquet file that are read at a time


def find_column(names: Sequence[str], column: str) -> str:
    """Return the column of a name in any case, "" where there is none.

    For path, label and split it may have another usual name.
    """
    for usual in (column, *ALIASES.get(column, ())):
        # The same case comes first.
        for name in (usual, *names):
            if name in names and name.lower() == usual.lower():
                return name
    return ""


def column_of(path: Path, names: Sequence[str], column: str, option: str) -> str:
    """Return the column of a name as `find_column` does.

    Raises:
        UserError: there is none; it tells the `option` to give.
    """
    name = find_column(names, column)
    if name:
        return name
    listed = ", ".join(names[:20])
    raise UserError(f"{path} has no column {column}: it has {listed}. Give data.{option}=COLUMN.")


def columns_of_numbers(
    module: ListedDataModule, path: Path, names: Sequence[str]
) -> dict[str, str]:
    """Return the table's column for each name that the module's options give."""
    columns = {}
    for name, option in module.column_options.items():
        # Weights are of training images alone: the table of an evaluation need not have them.
        is_needed = option != "sampling" or module.stage != "test"
        if is_needed or find_column(names, name):
            columns[name] = column_of(path, names, name, option)
    return columns


def splits_of(values: Sequence[str], column: str, where: Callable[[int], str]) -> list[int]:
    """Return the split that each value of a column names; [] where it is about something else.

    Args:
        where: what to call the row of a number.
    Raises:
        UserError: some values name splits, and others do not; or none does in a column named
            split, which has several.
    """
    tidy = [value.strip().lower() for value in values]
    names_none = SPLIT_OF.keys().isdisjoint(tidy)
    if names_none and (column.lower() != "split" or len(set(tidy)) == 1):
        return []
    for i, name in enumerate(tidy):
        if name not in SPLIT_OF:
            raise UserError(
                f"{where(i)}: {column} is {name or 'empty'}: give one of {', '.join(SPLITS)}. If "
                "the column is no split, give data.splits=false."
            )
    return [SPLIT_OF[name] for name in tidy]


@dataclass
class Columns:
    """The columns of a table that its images are listed by."""

    path: str
    labels: list[str]
    are_several: bool = False  # several labels for each image
    are_one_hot: bool = False  # a column for each class, with a single 1 in each row
    numbers: dict[str, str] = field(default_factory=dict)  # as of `columns_of_numbers`

    @property
    def used(self) -> set[str]:
        return {self.path, *self.labels}

    def label(self, row: Mapping[str, str]) -> str | list[str]:
        if self.are_one_hot:
            return next(name for name in self.labels if float(row[name]))
        if self.are_several:
            return [row[column] for column in self.labels]
        return row[self.labels[0]]


class CSVDataModule(ListedDataModule):
    """The first line names the columns, in any case.

    Commas, semicolons, tabs or bars separate them. configs/data/csv.yaml explains the options;
    `group` may name a column.
    """

    target_choices = ("class", "number", "mask")

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        images: str | Path | None = None,
        path_column: str = "path",
        label_column: str = "label",
        label_columns: Sequence[str] | None = None,
        suffix: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._table = local_root(root, "a CSV file with the columns path and label")
        self._folder = local_root(images or self._table.parent, "")
        self._path_column = path_column
        self._label_column = label_column
        self._label_columns = list(label_columns or [])
        self._suffix = suffix or ""

    def list_images(self) -> ImageList:
        table = read_csv(self._table)
        columns = self._columns(table)
        columns.numbers = columns_of_numbers(self, self._table, table.names)
        splits = self._splits(table, columns)
        if self.target == "number" or columns.are_several:
            table.read_decimal_commas(columns.labels)
        table.read_decimal_commas(list(columns.numbers.values()))

        faults: list[str] = []
        items = []
        for i, split in enumerate(splits):
            try:
                items.append(self._item(table, columns, i, split))
            except UserError as error:
                faults.append(str(error))
        items, left_out = self._without_repeats(items, faults)
        self.refuse_faults(faults, items, self._hint_on_endings(table, columns))
        if left_out:
            table.warnings.append(
                "Lines that repeat an earlier one count once. To give rare classes more weight, "
                "give data.sampling=balanced or loss.class_weights=auto."
            )
        return ImageList(
            self._folder,
            items,
            target=self.target,
            label_columns=self._label_columns,
            unknown=self.unknown,
            left_out=left_out,
            warnings=table.warnings,
        )

    def _columns(self, table: CSVTable) -> Columns:
        path = column_of(self._table, table.names, self._path_column, "path_column")
        if self._label_columns:
            return self._several_labels(table, path)
        one_hot = self._one_hot_columns(table, path)
        if one_hot:
            return Columns(path, one_hot, are_one_hot=True)
        label = column_of(self._table, table.names, self._label_column, "label_column")
        return Columns(path, [label])

    def _one_hot_columns(self, table: CSVTable, path: str) -> list[str]:
        """Return a column for each class where the table has them in place of a column label."""
        names_default = self._label_column == "label" and self.target == "class"
        if not names_default or find_column(table.names, "label"):
            return []
        columns = table.one_hot_columns(_possible_classes(table.names, path))
        if columns:
            table.warnings.append(
                f"{self._table} has no column label. The columns {', '.join(columns[:20])} are "
                "read as classes, because each row has a single 1 in them."
            )
        return columns

    def _several_labels(self, table: CSVTable, path: str) -> Columns:
        labels = [
            column_of(self._table, table.names, name, "label_columns")
            for name in self._label_columns
        ]
        if table.one_hot_columns(labels) == labels:
            table.warnings.append(
                "The label columns have a single 1 in each row. Leave data.label_columns out to "
                "read them as classes."
            )
        return Columns(path, labels, are_several=True)

    def _splits(self, table: CSVTable, columns: Columns) -> list[int]:
        """Return the split of each row, as a column says."""
        everything_trains = [TRAIN] * len(table.rows)
        if self.splits_option is False:
            return everything_trains
        candidates = [find_column(table.names, "split")]
        for name in table.names:
            if name not in columns.used and _tells_splits(table.column(name)):
                candidates.append(name)
        for name in filter(None, candidates):
            splits = splits_of(table.column(name), name, table.where)
            if splits:
                return splits
        self._check_other_columns(table, columns)
        return everything_trains

    def _check_other_columns(self, table: CSVTable, columns: Columns) -> None:
        """Refuse or report columns that say a split in a way that is not read."""
        others = [name for name in table.names if name not in columns.used | {self.group}]
        flags = [name for name in others if FLAG.fullmatch(name)]
        if flags:
            raise UserError(
                f"{self._table} has a column {flags[0]}: give one named split, with the names "
                "train, val and test, or data.splits=false to draw the splits."
            )
        if self.splits_option is True:
            raise UserError(
                f"data.splits=true, but {self._table} has no column of splits: add a column split "
                "with the names train, val and test."
            )
        for name in others:
            if FOLD.fullmatch(name):
                table.warnings.append(
                    f"The column {name} names no split and is not used. data.group={name} keeps "
                    "the rows of each of its values in one split; a column split with train, val "
                    "and test assigns them."
                )

    def _item(self, table: CSVTable, columns: Columns, i: int, split: int) -> Item:
        """
        Raises:
            UserError: the row lacks a value, or names a file that cannot be read.
        """
        row = table.rows[i]
        where = table.where(i)
        if not all(row[column] for column in columns.used):
            raise UserError(f"{where}: a path and a label are needed.")
        name = self._local(row[columns.path] + self._suffix)
        try:
            stat = os.stat(self._folder / name)
        except OSError as error:
            path = self._folder / name
            raise UserError(f"{where}: {path} cannot be read ({error.strerror}).") from None
        label = columns.label(row)
        if self.target == "mask" and isinstance(label, str):
            label = self._local(label)
            mask = self._folder / label
            if not is_file_name(mask):
                name = shorten(str(mask), LONGEST_NAME, placeholder=" …")
                raise UserError(f"{where}: the mask {name} does not exist.")
        item = Item(name, label, split, stat.st_size, stat.st_mtime_ns)
        item.group = self._group_of(row, name, where)
        item.line = table.lines[i]
        item.numbers = {name: row[column] for name, column in columns.numbers.items()}
        return item

    def _group_of(self, row: Mapping[str, str], name: str, where: str) -> str | None:
        """Return the group of an image, by a column or by its name.

        Raises:
            UserError: the cell of the column is empty.
        """
        if not self.group:
            return None
        column = find_column(list(row), self.group)
        if not column:
            return group_of(self.group, name)
        if not row[column]:
            raise UserError(f"{where}: {column} is empty, and data.group needs it for each image.")
        return row[column]

    def _local(self, name: str) -> str:
        """Return a path as this system writes it, also of one that was written on Windows."""
        if "\\" in name and not is_file_name(self._folder / name):
            return name.replace("\\", "/")
        return name

    def _without_repeats(
        self, items: Iterable[Item], faults: list[str]
    ) -> tuple[list[Item], LeftOut]:
        """Return each image once, and the lines that repeat one. Contradictions are faults."""
        first_of: dict[str, Item] = {}
        repeated = []
        for item in items:
            first = first_of.setdefault(os.path.normpath(item.name), item)
            is_same = (first.split, first.label, first.numbers) == (
                item.split,
                item.label,
                item.numbers,
            )
            if not is_same:
                faults.append(
                    f"{self._table}, lines {first.line} and {item.line}: {item.name} is "
                    f"{_description(first)} and {_description(item)}: give one."
                )
            elif first is not item:
                repeated.append(f"line {item.line}: {item.name}")
        return list(first_of.values()), {"repeated lines": repeated} if repeated else {}

    def _hint_on_endings(self, table: CSVTable, columns: Columns) -> str:
        """Return what to type where the first path of the table lacks the ending of its file."""
        path = self._folder / self._local(table.rows[0][columns.path])
        if self._suffix or path.exists():
            return ""
        for suffix in sorted(SUFFIXES):
            for ending in (suffix, suffix.upper()):
                if path.with_name(path.name + ending).exists():
                    return f"{path.name}{ending} exists: give data.suffix={ending}."
        return ""


def is_file_name(path: Path) -> bool:
    """Return whether a path exists; a text that is too long for a name is none."""
    try:
        return path.exists()
    except OSError:
        return False


def _description(item: Item) -> str:
    """Return "train cat 63", the split, the label and further numbers of an image."""
    return " ".join(map(str, (SPLITS[item.split], item.label, *item.numbers.values())))


def _possible_classes(names: Iterable[str], path: str) -> list[str]:
    """Return the columns that may be classes."""
    usual = {path.lower(), "split", *ALIASES["split"]}
    rest = [name for name in names if name and name.lower() not in usual]
    return [name for name in rest if not FLAG.fullmatch(name)]


def _tells_splits(values: Iterable[str]) -> bool:
    """Return whether a column has names of several splits and nothing else."""
    names = {value.lower() for value in values}
    return len(names) > 1 and names <= SPLIT_OF.keys()


@dataclass
class ParquetColumns:
    """The columns of a parquet file that are read."""

    image: str
    labels: list[str]
    class_names: list[str]  # as the file declares them; [] if it does not
    group: str
    split: str
    numbers: dict[str, str]  # as of `columns_of_numbers`

    @property
    def all(self) -> list[str]:
        named = filter(None, (self.group, self.split))
        return sorted({self.image, *self.labels, *named, *self.numbers.values()})


@dataclass
class CopiedRows:
    """What was found beside the images, while they were copied out of a parquet file.

    Args:
        items: of the images, as of ReadShard.
        parts: the names of their splits, where a column tells them.
        files: for each image the file that its row names, as of identity_of, or None.
        unlabelled: the names of rows without a label.
    """

    items: list[list[Any]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    files: list[list[Any] | None] = field(default_factory=list)
    unlabelled: list[str] = field(default_factory=list)


class ParquetDataModule(ListedDataModule):
    """Images in parquet files, which are copied once into the node's cache to be read one by one.

    Images are encoded, or structs with `bytes` or `path`, or paths. configs/data/parquet.yaml
    explains the options; `group` may name a column.
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
        columns = [image_column, label_column, self._label_columns, self.target, self.group]
        if self.splits_option is False:
            columns.append("splits=false")
        if self.column_options:
            columns.append(list(self.column_options))
        self._shards = Shards(self, root, ".parquet", self._read_shard, columns)

    def list_images(self) -> ImageList:
        return self._shards.list_images(self._label_columns)

    def _read_shard(self, path: Path, folder: Path) -> Content:
        from pyarrow import ArrowException, parquet

        try:
            with parquet.ParquetFile(path) as file:
                columns = self._columns(path, file.schema_arrow)
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
            where = [f"{path}, {item[0]}" for item in copied.items]
            splits = splits_of(copied.parts, columns.split, where.__getitem__)
        left_out = {"rows without a label": copied.unlabelled} if copied.unlabelled else {}
        return {
            "items": copied.items,
            "data": ENCODED,
            "files": copied.files if any(copied.files) else [],
            "left_out": left_out,
            "splits": splits,
        }

    def _copy_rows(
        self, path: Path, rows: Iterable[Mapping[str, Any]], columns: ParquetColumns, copy: Path
    ) -> CopiedRows:
        """Write the encoded images one after the other into the file `copy`."""
        copied = CopiedRows()
        with copy.open("wb") as out:
            for number, row in enumerate(rows):
                name = f"row {number}"
                label = self._label(row, columns, f"{path}, {name}")
                if label is None and self.target == "class":
                    copied.unlabelled.append(name)
                    continue
                where = f"{path}, {name}: {columns.image}"
                image = _bytes_or_file(row[columns.image], where, path.parent)
                file = None
                if isinstance(image, Path):
                    file = identity_of(image)
                    image = image.read_bytes()
                start = out.tell()
                size = out.write(image)
                group = _group_of_row(row, columns.group, f"{path}, {name}")
                numbers = {key: _plain(row[column]) for key, column in columns.numbers.items()}
                copied.items.append([name, label, start, size, group, numbers])
                copied.files.append(file)
                if columns.split:
                    copied.parts.append(str(row[columns.split]))
        return copied

    def _label(self, row: Mapping[str, Any], columns: ParquetColumns, where: str) -> Any:
        """Return the label of a row; None if its class is missing."""
        if self._label_columns:
            return [row[column] for column in columns.labels]
        value = row[columns.labels[0]]
        if self.target != "class":
            return value
        if value in (None, -1):
            return None
        return _class_of(value, f"{where}: {columns.labels[0]}", columns.class_names)

    def _columns(self, path: Path, schema: Any) -> ParquetColumns:
        """Return the columns, as stated or declared."""
        kinds = {column.name: str(column.type) for column in schema}
        declared = _declared(schema, kinds)
        image = self._image_of(path, kinds, declared)
        group = find_column(list(kinds), str(self.group)) if self.group else ""
        split = find_column(list(kinds), "split")
        numbers = columns_of_numbers(self, path, list(kinds))
        if self._label_columns:
            labels = [
                column_of(path, list(kinds), name, "label_columns") for name in self._label_columns
            ]
            return ParquetColumns(image, labels, [], group, split, numbers)
        classes = _declared_as(declared, "ClassLabel")
        column = self._label_column or (classes[0] if len(classes) == 1 else "label")
        label = column_of(path, list(kinds), column, "label_column")
        class_names = []
        if label in classes:
            class_names = [str(name) for name in declared[label].get("names") or ()]
        return ParquetColumns(image, [label], class_names, group, split, numbers)

    def _image_of(
        self, path: Path, kinds: Mapping[str, str], declared: Mapping[str, Mapping[str, Any]]
    ) -> str:
        able = [name for name, kind in kinds.items() if "binary" in kind or "path: string" in kind]
        candidates = _declared_as(declared, "Image") or able
        if self._image_column:
            candidates = [self._image_column]
        if len(candidates) != 1:
            listed = ", ".join(candidates or list(kinds)[:20])
            raise UserError(
                f"{path}: the column of the images is not clear. Give data.image_column= one of "
                f"{listed}."
            )
        image = column_of(path, list(kinds), candidates[0], "image_column")
        if image not in able and "string" not in kinds[image]:
            raise UserError(
                f"{path}: the column {image} holds no encoded images, but {kinds[image]}."
            )
        return image


def _declared(schema: Any, kinds: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what Hugging Face's datasets write about the columns, {} where they did not."""
    with suppress(KeyError, TypeError, ValueError):
        features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
        return {
            name: feature
            for name, feature in features.items()
            if isinstance(feature, dict) and name in kinds
        }
    return {}


def _declared_as(declared: Mapping[str, Mapping[str, Any]], kind: str) -> list[str]:
    return [name for name, feature in declared.items() if feature.get("_type") == kind]


def _bytes_or_file(image: Any, where: str, folder: Path) -> bytes | Path:
    """Return the bytes of one image, or the file beside the table that holds them."""
    value = image
    if isinstance(image, Mapping):
        value = image.get("bytes") or image.get("path")
    if isinstance(value, str):
        # Path.is_file raises for a name that is too long.
        if not os.path.isfile(folder / value):
            raise UserError(
                f"{where} names {value[:100]}, and there is no file of that name in {folder}."
            )
        return folder / value
    if not value or not isinstance(value, bytes):
        kind = f", but a {type(value).__name__}" if value else ""
        raise UserError(f"{where} holds no image{kind}.")
    return value


def _group_of_row(row: Mapping[str, Any], column: str, where: str) -> str | None:
    """Return the group of a row of a parquet file; None without a column of groups.

    Raises:
        UserError: the row has none.
    """
    if not column:
        return None
    if row[column] is None:
        raise UserError(f"{where}: {column} is empty, and data.group needs it for each image.")
    return str(row[column])


def _plain(value: Any) -> Any:
    """Return a number as it is, and text of anything else, such as a decimal, for JSON."""
    return value if isinstance(value, int | float) else str(value)


def _class_of(value: Any, where: str, names: list[str]) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and 0 <= value < (len(names) or math.inf):
        return names[value] if names else str(value)
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(f"{where} is {str(value)[:50]}, which is not a class.")
