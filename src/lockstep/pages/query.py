"""The logbook's runs as a table that SQL filters; in a notebook: `from lockstep.pages.query import query`."""

import csv
import difflib
import importlib
import io
import json
import math
import re
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.pages import markdown
from lockstep.pages.facts import RunFacts
from lockstep.pages.json_values import mapping
from lockstep.pages.source import flatten, read_sources
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY

Run = dict[str, object]  # a run's values by their dotted names: JSON values, lists as JSON text

SHOWN = ("run_id", "status", "model", "data", "trainer", "epochs", "val/acc_best", "test/acc")
WHOLE = ("metrics", "test_acc_per_class", "hardware")  # not by dotted names: metrics have names, the others hundreds
MAX_COLUMNS = 1900  # SQLite's limit is 2000
# Quoted text and names, which stay as they are, or a bare word with the marks of our names
WORD = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|\[[^\]]*\]|`[^`]*`|[A-Za-z_][\w./-]*""")
READS = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION)
REFUSED_FUNCTIONS = ("load_extension", "fts3_tokenizer", "zeroblob", "randomblob")


def query(where: str = "1", *, sort: str | None = None, ascending: bool = False, logbook: Path | None = None) -> Any:
    """The runs of the logbook for which a condition holds.

    Args:
        where: an SQL condition over fields of the record, metrics and options by their names:
            "status = 'finished' and val/acc > 0.9 and optimizer.lr < 0.01".
        sort: a name; the largest value first, runs without it last.
    Returns:
        A pandas.DataFrame, a row for each run; without pandas a list of dicts.
    Raises:
        UserError: the condition is no SQL, or names no column.
    """
    found = find_runs(logbook or REPOSITORY / "logbook", where, sort, ascending=ascending)
    return importlib.import_module("pandas").DataFrame(found) if find_spec("pandas") else found


def find_runs(logbook: Path, where: str = "1", sort: str | None = None, *, ascending: bool = False) -> list[Run]:
    """As `query`: a dict for each run, oldest first, with the columns that one of them has.

    Raises:
        UserError: as query.
    """
    runs = [as_row(RunFacts(source)) for source in read_sources(logbook)]
    columns = columns_of(runs)
    order = f"{named(sort, columns)} IS NULL, {named(sort, columns)} {'ASC' if ascending else 'DESC'}" if sort else "1"
    sql = f"SELECT number FROM runs WHERE (\n{with_quotes(where, columns)}\n) ORDER BY {order}, number"
    with closing(in_memory(runs, columns)) as table:
        try:
            numbers = [row[0] for row in table.execute(sql)]
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise UserError(_sentence(str(error), columns)) from None
    found = [runs[number] for number in numbers if number in range(len(runs))]
    held = [name for name in columns if any(run.get(name) is not None for run in found)]
    return [{name: run.get(name) for name in held} for run in found]


def as_row(facts: RunFacts) -> Run:
    """Fields of the record first, so that they count where an option has the same name."""
    record = mapping(facts.source.get("record"))
    fields = flatten({key: value for key, value in record.items() if key not in WHOLE})
    own = {"run_id": facts.run_id, "status": facts.status, "peak_memory_gib": facts.peak_memory_gib}
    metrics = {name: None if value in ("nan", "inf", "-inf") else value for name, value in _metrics(record).items()}
    row = {**mapping(facts.source.get("config")), **fields, **metrics, **own}
    first = [*own, *fields, *metrics]
    return {name: _as_value(row[name]) for name in dict.fromkeys([*first, *row])}


def _metrics(record: Run) -> Run:
    return mapping(record.get("metrics"))


def _as_value(value: object) -> object:
    return json.dumps(value) if isinstance(value, list | dict) else value


def columns_of(runs: list[Run]) -> list[str]:
    """Of all runs; names that differ in case alone are one column to SQL."""
    names = {"run_id": "run_id", "status": "status"}
    for run in runs:
        for name in run:
            names.setdefault(name.lower(), name)
    return list(names.values())[:MAX_COLUMNS]


def in_memory(runs: list[Run], columns: list[str]) -> sqlite3.Connection:
    """A database that can only be read from here on: no ATTACH, no PRAGMA, no function that loads anything."""
    table = sqlite3.connect(":memory:")
    table.execute(f"CREATE TABLE runs (number, {', '.join(map(quoted, columns))})")
    marks = ", ".join("?" * (len(columns) + 1))
    rows = [[number, *(_for_sql(run.get(name)) for name in columns)] for number, run in enumerate(runs)]
    table.executemany(f"INSERT INTO runs VALUES ({marks})", rows)
    table.commit()
    table.set_authorizer(_may)
    return table


def _may(action: int, _table: str | None, function: str | None, *_: str | None) -> int:
    refused = action not in READS or (action == sqlite3.SQLITE_FUNCTION and function in REFUSED_FUNCTIONS)
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


def _for_sql(value: object) -> object:
    if isinstance(value, int) and abs(value) >= 2**63:
        return float(value)
    return value if isinstance(value, int | float | None) else str(value)


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def named(name: str, columns: list[str]) -> str:
    """
    Raises:
        UserError: there is no such column; says which are near.
    """
    if name.lower() not in {column.lower() for column in columns}:
        raise UserError(_sentence(f"no such column: {name}", columns))
    return quoted(name)


def with_quotes(where: str, columns: list[str]) -> str:
    """Names such as val/acc and optimizer.lr in SQL's quotes.

    Raises:
        UserError: a quoted name is no column: SQL would take it for a text.
    """
    known = {column.lower() for column in columns}

    def of(match: re.Match[str]) -> str:
        word = match[0]
        if word.startswith('"'):
            return named(word[1:-1].replace('""', '"'), columns)
        return quoted(word) if word.lower() in known else word

    return WORD.sub(of, where)


def _sentence(error: str, columns: list[str]) -> str:
    if not error.startswith("no such column: "):
        return f"The condition is no SQL that reads runs ({error}): as \"status = 'finished' and val/acc > 0.9\"."
    if columns == columns_of([]):
        return "The logbook keeps no run yet: python src/logbook.py keep RUN takes one in."
    name = error.removeprefix("no such column: ")
    lower = {column.lower(): column for column in reversed(columns)}
    near = [lower[word] for word in difflib.get_close_matches(name.lower(), lower, 3, cutoff=0.5)]
    near += [column for column in columns if column.split(".")[-1] == name or column.startswith(f"{name}/")]
    take = ", ".join(list(dict.fromkeys(near))[:5] or SHOWN)
    return f"No run has {name!r}: take {take}; a text stands in single quotes."


def listing(runs: list[Run], form: str, sort: str | None = None) -> str:
    """json, csv (both with all columns), md, or text: an aligned table."""
    if form == "json":
        return json.dumps(runs, indent=1, ensure_ascii=False)
    names = list(runs[0]) if runs else []
    if form == "csv":
        out = io.StringIO()
        writer = csv.DictWriter(out, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(runs)
        return out.getvalue().rstrip("\n")
    shown = [name for name in dict.fromkeys([*SHOWN, *([sort] if sort else [])]) if name in names]
    cells = [[_cell(run[name]) for name in shown] for run in runs]
    right = ["r" if all(isinstance(run[name], int | float | None) for run in runs) else "l" for name in shown]
    if form == "md":
        escaped = [[markdown.plain(cell) for cell in row] for row in cells]
        return markdown.table([markdown.plain(name) for name in shown], escaped, "".join(right)).rstrip("\n")
    lines = [shown, *cells] if runs else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        [
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(line, widths, right, strict=True)
        ]
        for line in lines
    ]
    without = sum(run.get(sort) is None for run in runs) if sort else 0
    last = f", {without} of them without {sort}: last" if without else ""
    words = f"{len(runs)} run{'s' * (len(runs) != 1)}{last}"
    return "\n".join([*("  ".join(line).rstrip() for line in aligned), words])


def _cell(value: object) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return "" if value is None else markdown.one_line(value, 60)
