"""Images that a table lists: one line for each, with its file, its target and perhaps its split."""

import codecs
import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS, ImageList, LeftOut, group_of, local_root, make_list, suggestion
from lockstep.runs.errors import UserError

DELIMITERS = ",;\t|"
ALIASES = {  # tried where the table has no column of the option's name
    "path": ("file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("class", "class_name", "target", "category"),
    "split": ("set", "subset", "partition", "fold"),
}  # fmt: skip
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class Row(NamedTuple):
    line: int
    path: str
    label: str | tuple[str, ...]
    split: str
    group: str


class CSVDataModule(ListedDataModule):
    """Columns may be separated by commas, semicolons, tabs or bars; names of columns may be in any case.

    Args:
        root: the CSV file, whose first line names the columns.
        images: the folder that paths are relative to; None: the folder of the file.
        path_column, label_column: names of the columns of image files and classes.
        label_columns: several columns of numbers, mostly 0 and 1, in place of label_column.
        split_column: name of the column of train, val or test; a file may do without it.
        target: what label_column holds: class, number, or mask, the path of an image whose pixels are classes.
        options: as of ListedDataModule; `group` may name a column.
    """

    target_choices = ("class", "number", "mask")

    def __init__(
        self, *, root: str | Path | None = None, images: str | Path | None = None, path_column: str = "path",
        label_column: str = "label", label_columns: Sequence[str] | None = None, split_column: str = "split",
        name: str = "csv", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name, **options)
        self._table = local_root(root, "csv", "FILE.csv, with the columns path and label")
        self._folder = local_root(images or self._table.parent, "csv", "FILE.csv")
        self._columns = {"path": path_column, "label": label_column, "split": split_column}
        self._label_columns = list(label_columns or [])

    def list_images(self) -> ImageList:
        rows: dict[str, Row] = {}
        left_out: LeftOut = {}
        for row in self._rows():
            first = rows.setdefault(row.path, row)
            for what in ("split", "label"):
                if (old := getattr(first, what)) != (new := getattr(row, what)):
                    where = f"{self._table}, lines {first.line} and {row.line}"
                    raise UserError(f"{where}: {row.path} has the {what}s {old} and {new}: give one.")
            if row is not first:
                left_out.setdefault("repeated lines", []).append(f"line {row.line}: {row.path}")
        stats = [self._stat(row) for row in rows.values()]
        return make_list(
            self._folder, list(rows), [row.label for row in rows.values()],
            [SPLIT_OF[row.split] for row in rows.values()], [each.st_size for each in stats],
            [each.st_mtime_ns for each in stats], left_out=left_out, target=self.target,
            label_columns=self._label_columns,
            groups=[row.group or group_of(self.group, row.path) for row in rows.values()] if self.group else None,
        )  # fmt: skip

    def _stat(self, row: Row) -> os.stat_result:
        try:
            return os.stat(self._folder / row.path)
        except OSError as error:
            where = f"{self._table}, line {row.line}: {self._folder / row.path}"
            raise UserError(f"{where} cannot be read ({error.strerror}).") from None

    def _rows(self) -> Iterator[Row]:
        try:
            data = self._table.read_bytes()
            text = data.decode("utf-16" if data.startswith(UTF_16) else "utf-8-sig")
            header = text.partition("\n")[0]
            rows = csv.reader(text.splitlines(keepends=True), delimiter=max(DELIMITERS, key=header.count), strict=True)
            names = [name.strip() for name in next(rows, [])]
            at = [self._position(what, names) for what in ("path", "split")]
            at.append(_find(names, self.group) if self.group else None)
            at += [self._label_position(column, names) for column in self._label_columns]
            at += [] if self._label_columns else [self._position("label", names)]
            for cells in rows:
                if any(cell.strip() for cell in cells):
                    yield self._row(cells, f"{self._table}, line {rows.line_num}", rows.line_num, names, at)
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            what = "cannot be read" if isinstance(error, OSError) else "is no CSV file in UTF-8 or UTF-16"
            hint = suggestion(self._table, "csv")
            raise UserError(f"data.root={self._table} {what} ({error}).{hint}") from None

    def _position(self, what: str, names: list[str]) -> int | None:
        wanted = self._columns[what]
        tried = (wanted, *(ALIASES[what] if wanted == what else ()))
        found = next((place for name in tried if (place := _find(names, name)) is not None), None)
        if found is None and what != "split":
            has = ", ".join(names[:20]) or "none"
            raise UserError(f"{self._table} has no column {wanted}: it has {has}; give data.{what}_column=.")
        return found

    def _label_position(self, column: str, names: list[str]) -> int:
        if (place := _find(names, column)) is None:
            raise UserError(f"data.label_columns: {self._table} has no column {column}: it has {', '.join(names)}.")
        return place

    def _row(self, cells: list[str], where: str, line: int, names: list[str], at: list[int | None]) -> Row:
        if len(cells) != len(names):
            raise UserError(f"{where}: {len(cells)} values for {len(names)} columns.")
        path, split, group, *labels = (cells[place].strip() if place is not None else "" for place in at)
        if not all(labels) or not path:
            raise UserError(f"{where}: a path and a label are needed.")
        split = split.lower() if at[1] is not None else "train"
        if split not in SPLIT_OF:
            raise UserError(f"{where}: the split is {split or 'empty'}: give one of {', '.join(SPLITS)}.")
        if "\\" in path and not (self._folder / path).exists():  # written on Windows
            path = path.replace("\\", "/")
        return Row(line, path, tuple(labels) if self._label_columns else labels[0], SPLITS[SPLIT_OF[split]], group)


def _find(names: list[str], wanted: str) -> int | None:
    """Return the column of this name; where there is none, of this name in another case."""
    for key in (str, str.lower):
        found = [key(name) for name in names]
        if key(wanted) in found:
            return found.index(key(wanted))
    return None
