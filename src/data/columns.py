"""Columns of a table: by their names in any case and by what they hold."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS
from lockstep.process.errors import UserError

# Names that are tried where a table has no column path, label or split.
ALIASES = {
    "path": ("file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("labels", "class", "class_name", "target", "category"),
    "split": ("set", "subset", "partition", "fold"),
}


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


def require_column(path: Path, names: Sequence[str], column: str, option: str) -> str:
    """Return the column of a name as `find_column` does.

    Raises:
        UserError: there is none; it tells the `option` to give.
    """
    name = find_column(names, column)
    if name:
        return name
    columns = ", ".join(names[:20])
    raise UserError(f"{path} has no column {column}: it has {columns}. Give data.{option}=COLUMN.")


def find_number_columns(
    module: ListedDataModule, path: Path, names: Sequence[str]
) -> dict[str, str]:
    """Return the table's column for each name that the module's options give."""
    columns = {}
    for name, option in module.column_options.items():
        # Weights are of training images alone: the table of an evaluation need not have them.
        is_needed = option != "sampling" or module.stage != "test"
        if is_needed or find_column(names, name):
            columns[name] = require_column(path, names, name, option)
    return columns


def parse_split_column(
    values: Sequence[str], column: str, location: Callable[[int], str]
) -> list[int]:
    """Return the split that each value of a column names; [] where it is about something else.

    Args:
        location: returns what to call the row of a number.
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
                f"{location(i)}: {column} is {name or 'empty'}: give one of {', '.join(SPLITS)}. "
                "If the column is no split, give data.splits=false."
            )
    return [SPLIT_OF[name] for name in tidy]
