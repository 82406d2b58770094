"""metrics.csv: one row per log point, its steps unique and rising also over restarts.

Lightning's CSVLogger deletes what an earlier start of the same run wrote; this one goes on in it.
"""

import csv
import logging
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.runs.csv_files import guarded, whole_lines
from lockstep.runs.files import write_atomically

log = logging.getLogger(__name__)

KEYS = ("step", "epoch", "time_s")
REPLACED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no text are read as

Row = dict[str, Any]  # a value by its column


class MetricsCsv(Logger):
    """
    Args:
        path: the file.
        resume_step: rows after this step are of a past that no longer counts, and go; None: start anew.
    """

    def __init__(self, path: str | Path, resume_step: int | None = None) -> None:
        super().__init__()
        self.path = Path(path)
        self.columns: list[str] = list(KEYS)
        self.row: Row = {}
        self.last_is_row = False  # the file's last line is the row that is being filled
        self.is_new = False  # the row holds what the file does not
        self._resume(resume_step)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """The run folder holds config.yaml."""

    @rank_zero_only
    def _resume(self, resume_step: int | None) -> None:
        rows: list[dict[str, str]] = []
        if resume_step is not None and self.path.exists():
            columns, found, damaged = read_rows(self.path)
            if damaged:
                log.warning(f"{self.path}: {damaged} damaged rows are left out.")
            self.columns = columns or list(KEYS)
            rows = [row for row in found if int(row["step"]) <= resume_step]
        if rows and int(rows[-1]["step"]) == resume_step:  # its validation may be still to come
            self.row = {**{name: value for name, value in rows[-1].items() if value}, "step": resume_step}
            self.last_is_row = True  # and this start may be killed before it comes
        self._write_all(rows)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Values of one step share a row, however many calls bring them.

        What self.log brings, through Lightning, comes after ours, counted from 0 and without our `time_s`.
        """
        if self.row and "time_s" not in metrics and step == self.row["step"] - 1:
            step = self.row["step"]
        if self.row and self.row["step"] != step:
            self.end_row()
            self.row, self.last_is_row = {}, False
        self.row = {**self.row, "step": step, **{guarded(name): value for name, value in metrics.items()}}
        self.is_new = True

    @rank_zero_only
    def end_row(self) -> None:
        """Write the current row, which stays open; a new column, or more of a row that is written, rewrites the file.

        Not `save`: Lightning calls that at its own times, when values of the same step may be still to come.
        """
        if not self.is_new:
            return
        new = [name for name in self.row if name not in self.columns]
        if new or self.last_is_row:
            rows: list[Row] = list(read_rows(self.path)[1])
            self.columns += new
            self._write_all([*(rows[:-1] if self.last_is_row else rows), self.row])
        else:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(_guarded(self.row))
        self.last_is_row, self.is_new = True, False

    def _write_all(self, rows: list[Row]) -> None:
        def write(file: Any) -> None:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(map(_guarded, rows))

        write_atomically(self.path, write)

    def finalize(self, status: str) -> None:
        self.end_row()


def read_rows(path: Path) -> tuple[list[str], list[dict[str, str]], int]:
    """Columns, rows, and how many rows are damaged and left out: other bytes than text, too many cells, no step.

    A row that a kill has cut short counts as far as it goes. No columns where the head itself is damaged.
    """
    rows, damaged = [], 0
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader(whole_lines(file), restval="")
        columns = list(reader.fieldnames or [])
        if "step" not in columns or any(REPLACED in name for name in columns):
            return [], [], sum(1 for _ in file)
        for row in reader:
            if None in row or any(REPLACED in cell for cell in row.values()) or not _is_step(row["step"]):
                damaged += 1
            else:
                rows.append(row)
    return columns, rows, damaged


def _is_step(cell: str) -> bool:
    return cell.isascii() and cell.isdecimal() and len(cell) < 16


def _guarded(row: Row) -> Row:
    return {name: guarded(value) for name, value in row.items()}
