"""Images that a CSV file lists."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from data.columns import (
    ALIASES,
    find_column,
    find_number_columns,
    parse_split_column,
    require_column,
)
from data.csv_file import CSVTable, read_csv

# Configs of older runs name it here.
from data.parquet import ParquetDataModule as ParquetDataModule
from lockstep.data.decoding import SUFFIXES
from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS, TRAIN, Item, LeftOut, match_group, resolve_root
from lockstep.process.errors import UserError

# Columns of 0 and 1 that mark the rows of one split have such names.
FLAG = re.compile("is_?(train|valid|val|validation|dev|test)(ing)?(_[a-z_]+)?", re.IGNORECASE)
FOLD = re.compile("(k|cv)?_?folds?(_?id)?", re.IGNORECASE)
LONGEST_NAME = 200  # characters of a path in a message


@dataclass
class Columns:
    """The columns of a table that list its images.

    Args:
        are_several: each image has several labels.
        are_one_hot: there is a label column for each class, with a single 1 in each row.
        numbers: see `find_number_columns`.
    """

    path: str
    labels: list[str]
    are_several: bool = False
    are_one_hot: bool = False
    numbers: dict[str, str] = field(default_factory=dict)

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
    """The data module of the images that a CSV file lists.

    The first line names the columns, in upper or lower case. Commas, semicolons, tabs or bars
    separate them. configs/data/csv.yaml explains the options. `group` may name a column.
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
        self._table = resolve_root(root, "a CSV file with the columns path and label")
        self._folder = resolve_root(images or self._table.parent, "")
        self._path_column = path_column
        self._label_column = label_column
        self._label_columns = list(label_columns or [])
        self._suffix = suffix or ""

    def list_images(self) -> ImageList:
        table = read_csv(self._table)
        columns = self._find_columns(table)
        columns.numbers = find_number_columns(self, self._table, table.names)
        splits = self._read_splits(table, columns)
        if self.target == "number" or columns.are_several:
            table.read_decimal_commas(columns.labels)
        table.read_decimal_commas(list(columns.numbers.values()))

        faults: list[str] = []
        items = []
        for i, split in enumerate(splits):
            try:
                items.append(self._make_item(table, columns, i, split))
            except UserError as error:
                faults.append(str(error))
        items, left_out = self._drop_repeats(items, faults)
        self.refuse_faults(faults, items, self._suggest_ending(table, columns))
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

    def _find_columns(self, table: CSVTable) -> Columns:
        path = require_column(self._table, table.names, self._path_column, "path_column")
        if self._label_columns:
            return self._find_label_columns(table, path)
        one_hot = self._find_one_hot_columns(table, path)
        if one_hot:
            return Columns(path, one_hot, are_one_hot=True)
        label = require_column(self._table, table.names, self._label_column, "label_column")
        return Columns(path, [label])

    def _find_one_hot_columns(self, table: CSVTable, path: str) -> list[str]:
        """Return the columns of the classes, if the table has them in place of a column label."""
        names_default = self._label_column == "label" and self.target == "class"
        if not names_default or find_column(table.names, "label"):
            return []
        columns = table.find_one_hot_columns(_list_possible_classes(table.names, path))
        if columns:
            table.warnings.append(
                f"{self._table} has no column label. The columns {', '.join(columns[:20])} are "
                "read as classes, because each row has a single 1 in them."
            )
        return columns

    def _find_label_columns(self, table: CSVTable, path: str) -> Columns:
        labels = [
            require_column(self._table, table.names, name, "label_columns")
            for name in self._label_columns
        ]
        if table.find_one_hot_columns(labels) == labels:
            table.warnings.append(
                "The label columns have a single 1 in each row. Leave data.label_columns out to "
                "read them as classes."
            )
        return Columns(path, labels, are_several=True)

    def _read_splits(self, table: CSVTable, columns: Columns) -> list[int]:
        """Return the split of each row, which a column says. Without one all rows train."""
        everything_trains = [TRAIN] * len(table.rows)
        if self.splits_option is False:
            return everything_trains
        candidates = [find_column(table.names, "split")]
        for name in table.names:
            if name not in columns.used and _names_splits(table.column(name)):
                candidates.append(name)
        for name in filter(None, candidates):
            splits = parse_split_column(table.column(name), name, table.location)
            if splits:
                return splits
        self._check_other_columns(table, columns)
        return everything_trains

    def _check_other_columns(self, table: CSVTable, columns: Columns) -> None:
        """Refuse or report columns that seem to say a split but are not read."""
        unused_columns = [name for name in table.names if name not in columns.used | {self.group}]
        flags = [name for name in unused_columns if FLAG.fullmatch(name)]
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
        for name in unused_columns:
            if FOLD.fullmatch(name):
                table.warnings.append(
                    f"The column {name} names no split and is not used. data.group={name} keeps "
                    "the rows of each of its values in one split; a column split with train, val "
                    "and test assigns them."
                )

    def _make_item(self, table: CSVTable, columns: Columns, i: int, split: int) -> Item:
        """Return the image of a row.

        Raises:
            UserError: the row lacks a value, or its file cannot be read.
        """
        row = table.rows[i]
        location = table.location(i)
        if not all(row[column] for column in columns.used):
            raise UserError(f"{location}: a path and a label are needed.")
        name = self._localise(row[columns.path] + self._suffix)
        try:
            stat = os.stat(self._folder / name)
        except OSError as error:
            path = self._folder / name
            raise UserError(f"{location}: {path} cannot be read ({error.strerror}).") from None
        label = columns.label(row)
        if self.target == "mask" and isinstance(label, str):
            label = self._localise(label)
            mask = self._folder / label
            if not is_file_name(mask):
                mask_text = shorten(str(mask), LONGEST_NAME, placeholder=" …")
                raise UserError(f"{location}: the mask {mask_text} does not exist.")
        return Item(
            name=name,
            label=label,
            split=split,
            num_bytes=stat.st_size,
            mtime=stat.st_mtime_ns,
            group=self._find_group(row, name, location),
            line=table.lines[i],
            column_values={key: row[column] for key, column in columns.numbers.items()},
        )

    def _find_group(self, row: Mapping[str, str], name: str, location: str) -> str | None:
        """Return the group of an image, by a column or by its name.

        Raises:
            UserError: the cell of the column is empty.
        """
        if not self.group:
            return None
        column = find_column(list(row), self.group)
        if not column:
            return match_group(self.group, name)
        if not row[column]:
            raise UserError(
                f"{location}: {column} is empty, and data.group needs it for each image."
            )
        return row[column]

    def _localise(self, name: str) -> str:
        """Return a path with slashes, also if it was written with backslashes on Windows."""
        if "\\" in name and not is_file_name(self._folder / name):
            return name.replace("\\", "/")
        return name

    def _drop_repeats(self, items: Iterable[Item], faults: list[str]) -> tuple[list[Item], LeftOut]:
        """Return each image once, and the lines that repeat an image as left out.

        Args:
            faults: gets a sentence for each line that contradicts an earlier line.
        """
        first_of: dict[str, Item] = {}
        repeats = []
        for item in items:
            earlier = first_of.setdefault(os.path.normpath(item.name), item)
            if _get_facts(earlier) != _get_facts(item):
                faults.append(
                    f"{self._table}, lines {earlier.line} and {item.line}: {item.name} is "
                    f"{_describe(earlier)} and {_describe(item)}: give one."
                )
            elif earlier is not item:
                repeats.append(f"line {item.line}: {item.name}")
        left_out = {"repeated lines": repeats} if repeats else {}
        return list(first_of.values()), left_out

    def _suggest_ending(self, table: CSVTable, columns: Columns) -> str:
        """Return what to type if the first path of the table lacks the ending of its file."""
        path = self._folder / self._localise(table.rows[0][columns.path])
        if self._suffix or path.exists():
            return ""
        for suffix in sorted(SUFFIXES):
            for ending in (suffix, suffix.upper()):
                if path.with_name(path.name + ending).exists():
                    return f"{path.name}{ending} exists: give data.suffix={ending}."
        return ""


def is_file_name(path: Path) -> bool:
    """Return whether a path exists. A text that is too long for a name does not."""
    try:
        return path.exists()
    except OSError:
        return False


def _get_facts(item: Item) -> tuple[Any, ...]:
    """Return the values in which two lines on the same image must agree."""
    return item.split, item.label, item.column_values


def _describe(item: Item) -> str:
    """Return "train cat 63", the split, the label and further numbers of an image."""
    return " ".join(map(str, (SPLITS[item.split], item.label, *item.column_values.values())))


def _list_possible_classes(names: Iterable[str], path: str) -> list[str]:
    """Return the columns that may be classes."""
    usual = {path.lower(), "split", *ALIASES["split"]}
    rest = [name for name in names if name and name.lower() not in usual]
    return [name for name in rest if not FLAG.fullmatch(name)]


def _names_splits(values: Iterable[str]) -> bool:
    """Return whether a column has names of several splits and nothing else."""
    names = {value.lower() for value in values}
    return len(names) > 1 and names <= SPLIT_OF.keys()
