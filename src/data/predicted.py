"""Read the images and the numbers beside them that a CSV file lists for a prediction."""

import math
from collections.abc import Iterable
from pathlib import Path

from data.columns import find_column
from data.csv_file import read_csv
from lockstep.process.errors import UserError

Numbers = dict[str, float]


def read_listed_images(
    path: Path, inputs: Iterable[str]
) -> tuple[dict[str, Path], dict[str, Numbers]]:
    """Return the files in the column path of a table by name, and the numbers of each by name.

    Args:
        inputs: the names of the columns of numbers.

    Raises:
        UserError: a column is missing, a value is no number, or two lines give one image different
            numbers.
    """
    table = read_csv(path, option="images")
    path_column = find_column(table.names, "path")
    if not path_column:
        raise UserError(
            f"images={path} has no column path: it has {', '.join(table.names[:20])}. Rename the "
            "column of the images to path."
        )
    names = table.column(path_column)
    columns = {name: _require_column(path, table.names, name) for name in inputs}
    table.read_decimal_commas(list(columns.values()))
    files = {name: path.parent / name for name in names}
    numbers: dict[str, Numbers] = {}
    for i, name in enumerate(names):
        row = table.rows[i]
        location = table.location(i)
        row_numbers = {
            key: _parse_number(row[column], column, location) for key, column in columns.items()
        }
        if numbers.setdefault(name, row_numbers) != row_numbers:
            raise UserError(
                f"{location}: {name} is listed before with other numbers, and a prediction has one "
                "row for each path. Predict them from two tables."
            )
    return files, numbers


def _require_column(path: Path, names: list[str], name: str) -> str:
    if name in names:
        return name
    raise UserError(
        f"{path} has no column {name}, which the net takes beside an image. Add the column."
    )


def _parse_number(text: str, column: str, location: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{location}: {column} is {text or 'empty'}. Write a number there.")
    return number
