"""Find the columns of a table by their names in upper or lower case, and by their values."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import SPLIT_OF, SPLITS
from lockstep.process.errors import UserError

# These names are tried if a table has no column path, label or split.
ALIASES = {
    "path": ("file", "filename", "file_name", "filepath", "image", "image_path", "img"),
    "label": ("labels", "class", "class_name", "target", "category"),
    "split": ("set", "subset", "partition", "fold"),
}


def find_column(names: Sequence[str], column: str) -> str:
    """Return the column with a name in upper or lower case; "" if there is none.

    The columns path, label and split may also have one of their ALIASES.
    """
    for usual in (column, *ALIASES.get(column, ())):
        if usual in names:
            return usual
        for name in names:
            if name.lower() == usual.lower():
                return name
    return ""


def require_column(path: Path, names: Sequence[str], column: str, option: str) -> str:
    """Return the column of `find_column`.

    Raises:
        UserError: there is none. The error says which `option` to give.
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
        # Only training images need weights, so the table of an evaluation may lack them.
        is_needed = option != "sampling" or module.stage != "test"
        if is_needed or find_column(names, name):
            columns[name] = require_column(path, names, name, option)
    return columns


def parse_split_column(
    values: Sequence[str], column: str, location: Callable[[int], str]
) -> list[int]:
    """Return the split that each value of a column names; [] if the column names no splits.

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
