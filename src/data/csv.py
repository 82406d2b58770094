"""Images that a table lists: one line for each, with its file, its class and perhaps its split."""

import codecs
import csv
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import (
    SPLIT_OF,
    SPLITS,
    TRAIN,
    ImageList,
    group_of,
    local_root,
    make_list,
    suggestion,
)
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
        path_column: name of the column of image files.
        label_column: name of the column of classes.
        split_column: name of the column of train, val or test; a file may do without it.
        options: as of ListedDataModule; `group` may name a column.
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
        super().__init__(name=name, **options)
        self._table = local_root(root, "csv", "FILE.csv, with the columns path and label")
        self._folder = local_root(images or self._table.parent, "csv", "FILE.csv")
        self._columns = {"path": path_column, "label": label_column, "split": split_column}

    def list_images(self) -> ImageList:
        lines: dict[str, tuple[int, str, str, str | None]] = {}  # by path: line, label, split, group
        left_out: dict[str, list[str]] = {}
        for number, path, label, split, group in self._lines():
            if path not in lines:
                lines[path] = (number, label, split or "", group)
                continue
            first, *before = lines[path]
            for what, old, new in zip(("split", "label"), (before[1], before[0]), (split or "", label)):
                if old != new:
                    raise UserError(
                        f"{self._table}, lines {first} and {number}: {path} has the {what}s {old} and {new}: give one."
                    )
            left_out.setdefault("repeated lines", []).append(f"line {number}: {path}")
        stats = [self._stat(path, number) for path, (number, *_) in lines.items()]
        rows = list(lines.values())
        groups = [group or group_of(self.group, path) for path, (*_, group) in lines.items()] if self.group else None
        return make_list(
            self._folder, list(lines), [label for _, label, _, _ in rows],
            [SPLIT_OF[split] if split else TRAIN for _, _, split, _ in rows],
            [each.st_size for each in stats], [each.st_mtime_ns for each in stats],
            groups=groups, left_out=left_out,
        )  # fmt: skip

    def _stat(self, path: str, number: int) -> os.stat_result:
        full = self._folder / path
        try:
            found = os.stat(full)
        except OSError as error:
            raise UserError(f"{self._table}, line {number}: {full} cannot be read ({error.strerror}).") from None
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"{self._table}, line {number}: {full} is no regular file.")
        return found

    def _lines(self) -> Iterator[tuple[int, str, str, str | None, str | None]]:
        """Line number, path, label, split and group of each image."""
        try:
            data = self._table.read_bytes()
            text = data.decode("utf-16" if data.startswith(UTF_16) else "utf-8-sig")
            header, _, _ = text.partition("\n")
            rows = csv.reader(text.splitlines(keepends=True), delimiter=max(DELIMITERS, key=header.count), strict=True)
            names = [name.strip() for name in next(rows, [])]
            at = {what: self._position(what, names) for what in self._columns}
            of_group = _find(names, self.group) if self.group else None
            for row in rows:
                if any(cell.strip() for cell in row):
                    yield (rows.line_num, *self._parsed(row, rows.line_num, len(names), at, of_group))
        except OSError as error:
            hint = suggestion(self._table, "csv")
            raise UserError(f"data.root={self._table} cannot be read ({error.strerror}).{hint}") from None
        except (csv.Error, UnicodeDecodeError) as error:
            hint = suggestion(self._table, "csv")
            raise UserError(f"data.root={self._table} is no CSV file in UTF-8 or UTF-16 ({error}).{hint}") from None

    def _position(self, what: str, names: list[str]) -> int | None:
        wanted = self._columns[what]
        for name in (wanted, *(ALIASES[what] if wanted == what else ())):
            if (place := _find(names, name)) is not None:
                return place
        if what == "split":
            return None
        raise UserError(
            f"{self._table} has no column {wanted}: it has {', '.join(names[:20]) or 'none'}; give data.{what}_column=."
        )

    def _parsed(
        self, row: list[str], number: int, width: int, at: dict[str, int | None], of_group: int | None
    ) -> tuple[str, str, str | None, str | None]:
        where = f"{self._table}, line {number}"
        if len(row) != width:
            raise UserError(f"{where}: {len(row)} values for {width} columns.")
        path, label, split = (row[place].strip() if place is not None else "" for place in at.values())
        if not label or not path:
            raise UserError(f"{where}: a path and a label are needed.")
        if at["split"] is not None and split.lower() not in SPLIT_OF:
            raise UserError(f"{where}: the split is {split or 'empty'}: give one of {', '.join(SPLITS)}.")
        if "\\" in path and not (self._folder / path).exists():  # written on Windows
            path = path.replace("\\", "/")
        group = row[of_group].strip() if of_group is not None else None
        return path, label, SPLITS[SPLIT_OF[split.lower()]] if split else None, group


def _find(names: list[str], wanted: str) -> int | None:
    """The column of this name; where there is none, of this name in another case."""
    for key in (str, str.lower):
        found = [key(name) for name in names]
        if key(wanted) in found:
            return found.index(key(wanted))
    return None
