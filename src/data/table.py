"""Images that a table lists: a CSV file that names their files, or parquet files that hold them."""

import csv
import io
import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from data.webdataset import ShardedDataModule
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS, ImageList, Item, LeftOut, group_of, local_root
from lockstep.data.node_cache import Content
from lockstep.runs.errors import UserError

ALIASES = {  # names that are tried where a table has no column path, label or split
    "path": ("file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("labels", "class", "class_name", "target", "category"),
    "split": ("set", "subset", "partition", "fold"),
}  # fmt: skip
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
        label_column: str = "label", label_columns: Sequence[str] | None = None, split_column: str | None = "split",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self._table = local_root(root, "a CSV file with the columns path and label")
        self._folder = local_root(images or self._table.parent, "")
        self._columns, self._label_columns = (path_column, label_column, split_column), list(label_columns or [])

    def list_images(self) -> ImageList:
        table, several, left_out, notes = self._table, self._label_columns, LeftOut(), []
        first: dict[str, tuple[int, Item]] = {}  # of each path, with its line
        try:
            data = table.read_bytes()
            text = data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
            delimiter = max(",;\t|", key=text.partition("\n")[0].count)
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(rows, [])]
            path = column_of(table, names, self._columns[0], "path_column")
            labels = [column_of(table, names, column, "label_columns") for column in several]
            labels = labels or [column_of(table, names, self._columns[1], "label_column")]
            split = column_of(table, names, self._columns[2]) if self._columns[2] else ""
            if self._columns[2] and not split and (split := _split_like(rows, names, {path, *labels})):
                notes.append(f"the column {split} tells training and test images (data.split_column=null ignores it)")
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
            next(rows, [])
            for cells in rows:
                line, row = rows.line_num, dict(zip(names, map(str.strip, cells)))
                where = f"{table}, line {line}"
                if not any(row.values()):
                    continue
                if len(cells) != len(names):
                    raise UserError(f"{where}: {len(cells)} values for {len(names)} columns.")
                if not all(row[column] for column in (path, *labels)):
                    raise UserError(f"{where}: a path and a label are needed.")
                part = row[split].lower() if split else "train"
                if part not in SPLIT_OF:
                    ways = f"give one of {', '.join(SPLITS)}, or data.split_column=null to ignore the column {split}"
                    raise UserError(f"{where}: the split is {part or 'empty'}: {ways}.")
                name, label = row[path], [row[column] for column in labels] if several else row[labels[0]]
                if "\\" in name and not (self._folder / name).exists():  # written on Windows
                    name = name.replace("\\", "/")
                try:
                    stat = os.stat(self._folder / name)
                except OSError as error:
                    raise UserError(f"{where}: {self._folder / name} cannot be read ({error.strerror}).") from None
                group = (row[self.group] if self.group in row else group_of(self.group, name)) if self.group else None
                item = Item(name, label, SPLIT_OF[part], stat.st_size, stat.st_mtime_ns, group)
                earlier, same = first.setdefault(os.path.normpath(name), (line, item))
                if (same.split, same.label) != (item.split, label):
                    found = " and ".join(f"{SPLITS[each.split]} {each.label}" for each in (same, item))
                    raise UserError(f"{table}, lines {earlier} and {line}: {name} is {found}: give one.")
                if same is not item:
                    left_out.setdefault("repeated lines", []).append(f"line {line}: {name}")
        except OSError as error:
            raise UserError(f"data.root={table} cannot be read ({error.strerror}): give a CSV file.") from None
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"data.root={table} is not a CSV file in UTF-8 or UTF-16 ({error}).") from None
        items = [item for _, item in first.values()]
        return ImageList(self._folder, items, left_out=left_out, notes=notes, target=self.target, label_columns=several)


def _split_like(rows: Iterable[Sequence[str]], names: Sequence[str], others: Collection[str]) -> str:
    """Return the column whose values are all names of splits, of several, or "" where there is none."""
    values: list[set[str]] = [set() for _ in names]
    for cells in rows:
        for found, cell in zip(values, cells):
            if len(found) <= len(SPLIT_OF):  # enough to tell
                found.add(cell.strip().lower())
    likely = (name for name, found in zip(names, values) if found <= SPLIT_OF.keys() and len(found) > 1)
    return next((name for name in likely if name not in others), "")


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
        self.shard_options = [image_column, label_column, list(self.label_columns), self.target, self.group, "split"]

    def read_shard(self, path: Path, folder: Path) -> Content:
        from pyarrow import ArrowException, parquet

        items: list[tuple[str, Any, int, int, str | None]] = []
        parts: list[str] = []
        try:
            with parquet.ParquetFile(path) as file, (folder / ENCODED).open("wb") as out:
                image, labels, class_names = self._columns_of(path, file.schema_arrow)
                group = [self.group] if self.group in file.schema_arrow.names else []
                split = [name for name in [column_of(path, file.schema_arrow.names, "split")] if name]
                for batch in file.iter_batches(ROWS, columns=[*{image, *labels, *group, *split}]):
                    for row in batch.to_pylist():
                        name, start = f"row {len(items)}", out.tell()
                        data = _encoded(row[image], f"{path}, {name}: {image}", path.parent)
                        label = [row[column] for column in labels] if self.label_columns else row[labels[0]]
                        if self.target == "class" and not self.label_columns:
                            label = _class_of(label, f"{path}, {name}: {labels[0]}", class_names)
                        items.append((name, label, start, out.write(data), str(row[group[0]]) if group else None))
                        parts += [str(row[column]).strip().lower() for column in split]
        except ArrowException as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path} is not a parquet file, or is cut off ({reason}): repair or remove it.") from None
        if unknown := {part for part in parts if part not in SPLIT_OF}:
            if unknown < set(parts):
                row = min(map(parts.index, unknown))
                raise UserError(f"{path}, row {row}: {split[0]} is {parts[row]}: give one of {', '.join(SPLITS)}.")
            parts = []  # the column is about something else
        return {"items": items, "data": ENCODED, "left_out": {}, "splits": [SPLIT_OF[part] for part in parts]}

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
    hint = " Images without labels test nothing: data.test='*val*' leaves them out." if value in (None, -1) else ""
    raise UserError(f"{where} is {str(value)[:50]}, which is not a class.{hint}")
