"""Images that a table lists: a line for each, with its file, its class and perhaps its split."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.image_list import SPLIT_OF, ImageList, sorted_out
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.places import Places, stats_of
from lockstep.data.root import on_this_disk, what_reads
from lockstep.runs.errors import UserError


@dataclass(frozen=True)
class Line:
    number: int  # in the file, from 1
    path: str  # relative to the folder of images, or absolute
    label: str
    split: int  # 0 train, 1 val, 2 test


class CSVDataModule(ListedDataModule):
    """Trains on the lines whose split is train; without such a column test images are drawn, as of a folder of classes.

    Args:
        root: the CSV file, with a line of column names.
        images: the folder that paths are relative to; None: the file's own.
        path_column: names the column of the image files.
        label_column: of the classes' names.
        split_column: of train, val or test; a file may do without it.
        options: as of ListedDataModule.
    """

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        images: str | Path | None = None,
        path_column: str = "path",
        label_column: str = "label",
        split_column: str = "split",
        name: str = "csv",
        **options: Any,
    ) -> None:
        if not root:
            raise UserError("data=csv needs data.root=FILE.csv, with the columns path and label.")
        self._table, self._columns = on_this_disk(root), (path_column, label_column, split_column)
        if self._table.is_dir():
            raise UserError(f"data.root={root} is a folder, and data=csv reads a file.{what_reads(self._table, 'csv')}")
        super().__init__(root=on_this_disk(images or self._table.parent), name=name, **options)

    def listed_from(self) -> list[Any]:
        return [str(self._table.absolute()), *self._columns]

    def list_images(self) -> ImageList:
        lines = list(self._lines())
        names, labels, counts, order = sorted_out(
            [line.label for line in lines],
            np.array([line.split for line in lines], np.int64),
            lambda i: f"{self._table}, line {lines[i].number}",
            self._table,
            needs_training=self.stage != "test",
        )
        lines = [lines[i] for i in order]
        try:
            stats = stats_of(self._root, [line.path for line in lines])
        except OSError as error:
            [line, *_] = [line for line in lines if str(self._root / line.path) == str(error.filename)]
            raise UserError(
                f"{self._table}, line {line.number}: there is no file {error.filename} ({error.strerror})."
            ) from None
        places = Places.of_files(self._root, [line.path for line in lines], stats)
        return ImageList(names, labels, counts, places, [self._table])

    def _lines(self) -> Iterator[Line]:
        try:
            with self._table.open(newline="", encoding="utf-8-sig") as file:
                rows = csv.reader(file, strict=True)
                header = next(rows, [])
                places = self._places(header)
                for row in rows:
                    if row:
                        yield self._line(row, rows.line_num, places, len(header))
        except OSError as error:
            raise UserError(f"data.root={self._table} cannot be read ({error.strerror}).") from None
        except (csv.Error, UnicodeDecodeError) as error:
            hint = what_reads(self._table, "csv")
            raise UserError(f"data.root={self._table} is no CSV file in UTF-8 ({error}).{hint}") from None

    def _places(self, header: list[str]) -> tuple[int, int, int | None]:
        for option, column in zip(("path_column", "label_column"), self._columns, strict=False):
            if column not in header:
                raise UserError(
                    f"{self._table} has no column {column}: it has {', '.join(header[:20]) or 'none'}; "
                    f"say data.{option}=."
                )
        path, label, split = self._columns
        return header.index(path), header.index(label), header.index(split) if split in header else None

    def _line(self, row: list[str], number: int, places: tuple[int, int, int | None], width: int) -> Line:
        at = f"{self._table}, line {number}"
        if len(row) != width:
            raise UserError(f"{at}: {len(row)} values for {width} columns.")
        path, label = row[places[0]], row[places[1]]
        if not label or not path:
            raise UserError(f"{at}: a path and a label are needed.")
        said = row[places[2]].strip().lower() if places[2] is not None else "train"
        if said not in SPLIT_OF:
            raise UserError(f"{at}: {self._columns[2]} is {said or 'empty'}: it is one of train, val and test.")
        return Line(number, path, label, SPLIT_OF[said])
