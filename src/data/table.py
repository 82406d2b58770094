"""Images that a table lists: a CSV file that names their files, or parquet files that hold them."""

import csv
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.webdataset import ShardedDataModule
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS, TRAIN, ImageList, Item, LeftOut, group_of, local_root
from lockstep.data.node_cache import Content
from lockstep.runs.errors import UserError

ALIASES = {  # names that are tried where a table has no column path, label or split
    "path": ("file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("labels", "class", "class_name", "target", "category"),
    "split": ("set", "subset", "partition", "fold"),
}  # fmt: skip
FLAG = re.compile("is_?(train|valid|val|validation|dev|test)(ing)?(_[a-z_]+)?")  # a column of 0 and 1
ENCODED, ROWS = "encoded.bin", 64  # rows of a parquet file that are read at a time


def column_of(path: Path, names: Sequence[str], wanted: str, option: str = "") -> str:
    """Return the column of a name, in any case; for path, label and split also of a usual other name.

    Where there is none, return "", or raise a UserError that tells the `option` to give.
    """
    for name in (wanted, *ALIASES.get(wanted, ())):
        for column in sorted(names, key=lambda each: each != name):  # the very name first
            if column.lower() == name.lower():
                return column
    if option:
        raise UserError(f"{path} has no column {wanted}: it has {', '.join(names[:20])}. Give data.{option}=COLUMN.")
    return ""


class CSVDataModule(ListedDataModule):
    """The first line names the columns, in any case; commas, semicolons, tabs or bars separate them.

    configs/data/csv.yaml explains the options; `group` may name a column.
    """

    target_choices = ("class", "number", "mask")

    def __init__(
        self, *, root: str | Path | None = None, images: str | Path | None = None, path_column: str = "path",
        label_column: str = "label", label_columns: Sequence[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self._table = local_root(root, "a CSV file with the columns path and label")
        self._folder = local_root(images or self._table.parent, "")
        self._path_column, self._label_column, self._several = path_column, label_column, list(label_columns or [])

    def list_images(self) -> ImageList:
        table, several, left_out = self._table, self._several, LeftOut()
        names, rows = self._rows()
        path = column_of(table, names, self._path_column, "path_column")
        labels = [column_of(table, names, column, "label_columns") for column in several]
        labels = labels or [column_of(table, names, self._label_column, "label_column")]
        likely = [name for name in names if name not in (path, *labels) and _tells_splits(row[name] for _, row in rows)]
        parts: list[int] = []
        for name in filter(None, [column_of(table, names, "split"), *likely]):
            parts = parts or splits_of([row[name] for _, row in rows], name, lambda i: f"{table}, line {rows[i][0]}")
        if not parts and (flags := [name for name in names if FLAG.fullmatch(name.lower()) and name not in labels]):
            raise UserError(
                f"{table} has a column {flags[0]}: give one named split, with the names train, val and test."
            )
        first: dict[str, tuple[int, Item]] = {}  # of each path, with its line
        for i, (line, row) in enumerate(rows):
            if not all(row[column] for column in (path, *labels)):
                raise UserError(f"{table}, line {line}: a path and a label are needed.")
            name, label = row[path], [row[column] for column in labels] if several else row[labels[0]]
            if "\\" in name and not (self._folder / name).exists():  # written on Windows
                name = name.replace("\\", "/")
            try:
                stat = os.stat(self._folder / name)
            except OSError as error:
                fault = f"{self._folder / name} cannot be read ({error.strerror})"
                raise UserError(f"{table}, line {line}: {fault}.") from None
            if self.target == "mask" and isinstance(label, str) and not (self._folder / label).exists():
                label = label.replace("\\", "/")
                if not (self._folder / label).exists():
                    raise UserError(f"{table}, line {line}: the mask {self._folder / label} does not exist.")
            group = (row[self.group] if self.group in row else group_of(self.group, name)) if self.group else None
            item = Item(name, label, parts[i] if parts else TRAIN, stat.st_size, stat.st_mtime_ns, group)
            earlier, same = first.setdefault(os.path.normpath(name), (line, item))
            if (same.split, same.label) != (item.split, label):
                found = " and ".join(f"{SPLITS[each.split]} {each.label}" for each in (same, item))
                raise UserError(f"{table}, lines {earlier} and {line}: {name} is {found}: give one.")
            if same is not item:
                left_out.setdefault("repeated lines", []).append(f"line {line}: {name}")
        items = [item for _, item in first.values()]
        return ImageList(self._folder, items, left_out=left_out, target=self.target, label_columns=several)

    def _rows(self) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
        """Return the names of the columns, and each row with the number of its line."""
        rows = []
        try:
            data = self._table.read_bytes()
            text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
            delimiter = max(",;\t|", key=text.partition("\n")[0].count)
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(reader, [])]
            if len(set(filter(None, names))) < len(list(filter(None, names))):
                raise UserError(f"{self._table}: two columns have one name.")
            for cells in filter(any, reader):
                if len(cells) != len(names):
                    where = f"{self._table}, line {reader.line_num}"
                    raise UserError(f"{where}: {len(cells)} values for {len(names)} columns.")
                rows.append((reader.line_num, dict(zip(names, map(str.strip, cells)))))
        except OSError as error:
            raise UserError(f"data.root={self._table} cannot be read ({error.strerror}): give a CSV file.") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"data.root={self._table} is not a CSV file in UTF-8 or UTF-16 ({error}).") from None
        if not rows:
            raise UserError(f"data.root={self._table} has no rows.")
        return names, rows


def _tells_splits(values: Iterable[str]) -> bool:
    """Return whether a column has names of several splits and nothing else."""
    found = {value.lower() for value in values}
    return len(found) > 1 and found <= SPLIT_OF.keys()


def splits_of(values: Sequence[str], column: str, where: Callable[[int], str]) -> list[int]:
    """Return the split that each value of a column names; [] where the column is about something else.

    Args:
        where: what to call the row of a number.
    Raises:
        UserError: some values name splits, and others do not; or none does in a column named split, which has several.
    """
    tidy = [value.strip().lower() for value in values]
    if SPLIT_OF.keys().isdisjoint(tidy) and (column.lower() != "split" or len({*tidy}) == 1):
        return []
    for i, name in enumerate(tidy):
        if name not in SPLIT_OF:
            raise UserError(f"{where(i)}: {column} is {name or 'empty'}: give one of {', '.join(SPLITS)}.")
    return [SPLIT_OF[name] for name in tidy]


class ParquetDataModule(ShardedDataModule):
    """Images in parquet files; the encoded images are copied once into the node's cache, for access to single ones.

    Images are encoded, or structs with `bytes` or `path`, or paths. configs/data/parquet.yaml explains the options;
    `group` may name a column.
    """

    suffix = ".parquet"

    def __init__(
        self, *, image_column: str | None = None, label_column: str | None = None,
        label_columns: Sequence[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self._image_column, self._label_column, self.label_columns = image_column, label_column, label_columns or []
        self.shard_options = [image_column, label_column, list(self.label_columns), self.target, self.group]

    def read_shard(self, path: Path, folder: Path) -> Content:
        from pyarrow import ArrowException, parquet

        items: list[list[Any]] = []
        parts, unlabelled = list[str](), list[str]()
        try:
            with parquet.ParquetFile(path) as file, (folder / ENCODED).open("wb") as out:
                names = file.schema_arrow.names
                image, labels, class_names = self._columns_of(path, file.schema_arrow)
                group, split = self.group if self.group in names else "", column_of(path, names, "split")
                columns = {image, *labels, *filter(None, (group, split))}
                batches = file.iter_batches(ROWS, columns=list(columns))
                for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
                    name, start = f"row {number}", out.tell()
                    label = [row[column] for column in labels] if self.label_columns else row[labels[0]]
                    if self.target == "class" and not self.label_columns:
                        if label in (None, -1):
                            unlabelled.append(name)
                            continue
                        label = _class_of(label, f"{path}, {name}: {labels[0]}", class_names)
                    data = _encoded(row[image], f"{path}, {name}: {image}", path.parent)
                    items.append([name, label, start, out.write(data), str(row[group]) if group else None])
                    parts += [str(row[split])] if split else []
        except ArrowException as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path} is not a parquet file, or is cut off ({reason}): repair or remove it.") from None
        splits = splits_of(parts, split, lambda i: f"{path}, {items[i][0]}")
        left_out = {"rows without a label": unlabelled} if unlabelled else {}
        return {"items": items, "data": ENCODED, "left_out": left_out, "splits": splits}

    def _columns_of(self, path: Path, schema: Any) -> tuple[str, list[str], list[str]]:
        """Return the names of the columns of images and labels, and of the classes, as stated or declared."""
        declared, held = {}, {field.name: str(field.type) for field in schema}
        with suppress(KeyError, TypeError, ValueError):  # what Hugging Face's datasets write about the columns
            features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
            declared = {name: each for name, each in features.items() if isinstance(each, dict) and name in held}
        images, classes = (
            [name for name in held if declared.get(name, {}).get("_type") == kind] for kind in ("Image", "ClassLabel")
        )
        able = [name for name, kind in held.items() if "binary" in kind or "path: string" in kind]
        images = [self._image_column] if self._image_column else images or able
        if len(images) != 1:
            found = ", ".join(images or list(held)[:20])
            raise UserError(f"{path}: the column of the images is not clear. Give data.image_column= one of {found}.")
        image = column_of(path, list(held), images[0], "image_column")
        if image not in able and "string" not in held[image]:
            raise UserError(f"{path}: the column {image} holds no encoded images, but {held[image]}.")
        if self.label_columns:
            return image, [column_of(path, list(held), name, "label_columns") for name in self.label_columns], []
        wanted = self._label_column or (classes[0] if len(classes) == 1 else "label")
        label = column_of(path, list(held), wanted, "label_column")
        return image, [label], list(map(str, declared[label].get("names") or ())) if label in classes else []


def _encoded(image: Any, where: str, folder: Path) -> bytes:
    """Return the bytes of one image, which may be in a file beside the table."""
    value = (image.get("bytes") or image.get("path")) if isinstance(image, Mapping) else image
    if isinstance(value, str):
        if not os.path.isfile(folder / value):  # Path.is_file raises for a name that is too long
            raise UserError(f"{where} names {value[:100]}, and there is no file of that name in {folder}.")
        return (folder / value).read_bytes()
    if not value or not isinstance(value, bytes):
        raise UserError(f"{where} holds no image{f', but a {type(value).__name__}' if value else ''}.")
    return value


def _class_of(value: Any, where: str, names: list[str]) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and 0 <= value < (len(names) or math.inf):
        return names[value] if names else str(value)
    if isinstance(value, str) and value.strip():
        return value
    raise UserError(f"{where} is {str(value)[:50]}, which is not a class.")
