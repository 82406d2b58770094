"""Images that a table lists: one line for each, with its file, its target and perhaps its split."""

import codecs
import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS, ImageList, Item, LeftOut, group_of, local_root, suggestion
from lockstep.runs.errors import UserError

DELIMITERS = ",;\t|"
ALIASES = {  # tried where the table has no column of the option's name
    "path": ("file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("class", "class_name", "target", "category"),
    "split": ("set", "subset", "partition", "fold"),
}  # fmt: skip
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


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
        items: dict[str, Item] = {}
        lines: dict[str, int] = {}
        left_out: LeftOut = {}
        for line, item in self._rows():
            if item.name in items:
                left_out.setdefault("repeated lines", []).append(f"line {line}: {item.name}")
            first = items.setdefault(item.name, item)
            where = f"{self._table}, lines {lines.setdefault(item.name, line)} and {line}: {item.name} has the"
            if first.split != item.split:
                raise UserError(f"{where} splits {SPLITS[first.split]} and {SPLITS[item.split]}: give one.")
            if first.label != item.label:
                raise UserError(f"{where} labels {first.label} and {item.label}: give one.")
        return ImageList(
            self._folder, list(items.values()), left_out=left_out, target=self.target,
            label_columns=self._label_columns,
        )  # fmt: skip

    def _rows(self) -> Iterator[tuple[int, Item]]:
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
                    yield rows.line_num, self._item(cells, f"{self._table}, line {rows.line_num}", names, at)
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

    def _item(self, cells: list[str], where: str, names: list[str], at: list[int | None]) -> Item:
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
        try:
            stat = os.stat(self._folder / path)
        except OSError as error:
            raise UserError(f"{where}: {self._folder / path} cannot be read ({error.strerror}).") from None
        label = labels if self._label_columns else labels[0]
        name = (group or group_of(self.group, path)) if self.group else None
        return Item(path, label, SPLIT_OF[split], stat.st_size, stat.st_mtime_ns, name)


def _find(names: list[str], wanted: str) -> int | None:
    """Return the column of this name; where there is none, of this name in another case."""
    for key in (str, str.lower):
        found = [key(name) for name in names]
        if key(wanted) in found:
            return found.index(key(wanted))
    return None
