"""Images that a table lists: a line for each, with its file, its class and perhaps its split."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.image_folder import ImageFolderDataModule
from lockstep.data.image_tree import Listing, natural_key
from lockstep.runs.errors import UserError

SPLITS = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}


@dataclass(frozen=True)
class Line:
    number: int  # in the file, from 1
    path: Path
    label: str
    split: int  # 0 train, 1 val, 2 test


class CSVDataModule(ImageFolderDataModule):
    """Trains on the lines whose split is train; without such a column test images are drawn, as of a folder of classes.

    Args:
        root: the CSV file, with a line of column names.
        images: the folder that paths are relative to; None: the file's own.
        path_column: names the column of the image files.
        label_column: of the classes' names.
        split_column: of train, val or test; a file may do without it.
        options: as of data=image_folder.
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
        if not root or Path(root).is_dir():
            raise UserError(
                "data=csv needs data.root=FILE.csv, with the columns path and label (data=image_folder takes a folder)."
            )
        self._table, self._columns = Path(root), (path_column, label_column, split_column)
        super().__init__(root=Path(images or self._table.parent), name=name, **options)

    def _list(self) -> tuple[Listing, tuple[int, int, int]]:
        lines = sorted(self._lines(), key=lambda line: line.split)  # stable: in the order of the file
        counts = np.bincount([line.split for line in lines], minlength=3)
        if not counts[0]:
            raise UserError(f"{self._table} lists no image to train on.")
        names = sorted({line.label for line in lines if line.split == 0}, key=natural_key)
        places = {name: place for place, name in enumerate(names)}
        for line in lines:
            if line.label not in places:
                raise UserError(
                    f"{self._table}, line {line.number}: the class {line.label} has no line to train on; "
                    f"those that have: {', '.join(names[:20])}."
                )
        labels = np.array([places[line.label] for line in lines], np.int64)
        listing = Listing(names, [line.path for line in lines], labels)
        if counts[1:].any() and not counts[2]:
            raise UserError(f"{self._table} has lines to validate on and none to test on: call a part of them test.")
        if not counts[2]:
            self._num_drawn(len(lines))
        return listing, (int(counts[0]), int(counts[1]), int(counts[2]))

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
            raise UserError(f"data.root={self._table} is no CSV file in UTF-8 ({error}).") from None

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
        path, label = self._root / row[places[0]], row[places[1]]
        if not label or not row[places[0]]:
            raise UserError(f"{at}: a path and a label are needed.")
        if not path.is_file():
            raise UserError(f"{at}: there is no file {path}.")
        said = row[places[2]].strip().lower() if places[2] is not None else "train"
        if said not in SPLITS:
            raise UserError(f"{at}: {self._columns[2]} is {said or 'empty'}: it is one of train, val and test.")
        return Line(number, path, label, SPLITS[said])
