"""Read a table of text: its encoding, its delimiter, its columns and the line of each row."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.process.errors import UserError

UTF_16 = (b"\xff\xfe", b"\xfe\xff")
FLAGS = {"0", "1", "0.0", "1.0"}
SAVE_AS = "save it as CSV UTF-8 (in Excel: Save as, CSV UTF-8)"
DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
THOUSANDS = re.compile(r"[+-]?[0-9]{1,3},[0-9]{3}")


@dataclass
class CSVTable:
    """The columns of a CSV file, and its rows with their lines."""

    path: Path
    names: list[str]
    delimiter: str
    rows: list[dict[str, str]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)  # the line of each row in the file
    warnings: list[str] = field(default_factory=list)

    def location(self, row: int) -> str:
        """Return the name of a row in messages."""
        return f"{self.path}, line {self.lines[row]}"

    def column(self, name: str) -> list[str]:
        return [row[name] for row in self.rows]

    def read_decimal_commas(self, columns: Sequence[str]) -> None:
        """Write 3,5 as 3.5 in columns of numbers.

        Raises:
            UserError: a number such as 1,234 may mean 1.234 or 1234.
        """
        example = ""
        for i, row in enumerate(self.rows):
            for column in columns:
                value = row[column]
                if not DECIMAL_COMMA.fullmatch(value):
                    continue
                if self.delimiter == "," and THOUSANDS.fullmatch(value):
                    raise UserError(
                        f"{self.location(i)}: {column} is {value}, which may be "
                        f"{value.replace(',', '.')} or {value.replace(',', '')}: write one of them."
                    )
                example = example or value
                row[column] = value.replace(",", ".")
        if example:
            number = example.replace(",", ".")
            self.warnings.append(f"{self.path} has decimal commas: {example} is read as {number}.")

    def find_one_hot_columns(self, names: Iterable[str]) -> list[str]:
        """Return the columns among these that hold 0 and 1, if each row has a single 1; else []."""
        columns = [name for name in names if set(self.column(name)) <= FLAGS]
        if len(columns) < 2:
            return []
        for row in self.rows:
            if sum(float(row[name]) for name in columns) != 1:
                return []
        return columns


def read_csv(path: Path, option: str = "data.root") -> CSVTable:
    """Return the table in a file whose cells are separated by commas, semicolons, tabs or bars.

    Args:
        option: the option that gives the path, for errors.

    Raises:
        UserError: the file cannot be read, has no rows, or a line has another number of values.
    """
    source = f"{option}={path}"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{source} cannot be read ({error.strerror}): give a CSV file.") from None
    text, encoding = _decode(source, data)
    try:
        table = _parse(path, text)
    except csv.Error as error:
        raise UserError(f"{source} is not a CSV file ({error}).") from None
    if not table.rows:
        raise UserError(f"{source} has no rows.")
    if encoding == "cp1252":
        example = re.search(r"\S*[^\x00-\x7f]\S*", text)
        table.warnings.append(
            f"{path} is not UTF-8 and is read as Windows-1252: {example[0][:40] if example else ''}"
            f". If this is misspelt, {SAVE_AS}."
        )
    return table


def _parse(path: Path, text: str) -> CSVTable:
    delimiter = max(",;\t|", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    table = CSVTable(path, _read_column_names(path, next(reader, [])), delimiter)
    end = reader.line_num
    for cells in reader:
        # A quoted value may contain line breaks. A row is known by its first line.
        line = end + 1
        end = reader.line_num
        if not any(cells):
            continue
        table.lines.append(line)
        if len(cells) != len(table.names):
            raise UserError(
                f"{table.location(-1)}: {len(cells)} values for {len(table.names)} columns."
            )
        table.rows.append(dict(zip(table.names, map(str.strip, cells))))
    return table


def _decode(source: str, data: bytes) -> tuple[str, str]:
    """Return the text of a file, and its encoding: UTF-8, UTF-16 or Excel's own.

    Args:
        source: the file's name in errors.
    """
    encodings = ["utf-16"] if data[:2] in UTF_16 else ["utf-8-sig", "cp1252"]
    for encoding in encodings:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if "\0" not in text:
            return text, encoding
    raise UserError(f"{source} is not a CSV file in UTF-8 or UTF-16: {SAVE_AS}.")


def _read_column_names(path: Path, cells: Sequence[str]) -> list[str]:
    names = [name.strip() for name in cells]
    nonempty = [name for name in names if name]
    if len(set(nonempty)) < len(nonempty):
        raise UserError(f"{path}: two columns have one name.")
    return names
