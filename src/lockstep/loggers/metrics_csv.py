"""Write metrics.csv: one row for each log point, over all starts of a run.

Each step has one row, and the steps rise. Rows are appended, and only the last one may still
change, so that a log point costs the same after a week. Lightning's CSVLogger deletes the file of
an earlier start; this logger continues it.
"""

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lockstep.process.files import write_atomically

KEY_COLUMNS = ("step", "epoch", "time_s")
# TrainingLog fills these columns and KEY_COLUMNS.
TRAINING_COLUMNS = ("train/loss", "lr", "images_per_s")
Row = dict[str, Any]
Metrics = dict[str, float]


class MetricsCsv(Logger):
    """Write metrics.csv, and go on with the file of an earlier start of the run.

    `TrainingLog` makes the rows. If a module logs a value under the name of one of TrainingLog's
    columns, the value gets the column `module/<name>`. Without TrainingLog, the values that the
    module logs make the rows.
    """

    name = "csv"  # type: ignore[assignment]
    version = ""  # type: ignore[assignment]

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.table: MetricsTable | None = None  # None until this start logs a value
        self.has_training_log = False

    @property
    def experiment(self) -> "ScalarWriter":
        """Return the object to which a module gives scalars itself, without `self.log`."""
        return ScalarWriter(self)

    @rank_zero_only
    def begin_at(self, step: int, *, drops_partial_means: bool = False) -> None:
        """Begin to train at a step: remove the rows of later steps, and the results of tests.

        Args:
            step: optimizer steps at which this start begins.
            drops_partial_means: if the last row is that of `step`, remove its TRAINING_COLUMNS. An
                earlier start has stopped between two log points, and the next row covers its steps.
        """
        self.has_training_log = True
        self.table = MetricsTable(self.path, step)
        # A test writes into the last row. A name in an earlier row is one that the module logs.
        tests = {name for name in self.table.columns if name.startswith("test")}
        outdated = tests - self.table.earlier_names
        if drops_partial_means and self.table.step == step:
            outdated.update(TRAINING_COLUMNS)
        for name in outdated:
            self.table.last_row.pop(name, None)
        self.table.rewrite()

    @rank_zero_only
    def write_row(self, values: Row, step: int) -> None:
        """Add values of TrainingLog to the row of a step, and begin the row if there is none."""
        self.has_training_log = True
        if self.table is None:
            self.begin_at(step)
        assert self.table is not None
        self.table.add(max(step, self.table.step), values)
        self.table.save()

    @rank_zero_only
    def add_to_last_row(self, values: Row) -> None:
        """Add the results of a test to the last row, and remove no row."""
        if self.table is None:
            self.table = MetricsTable(self.path, math.inf)
        self.table.add(self.table.step, values)

    @rank_zero_only
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Add the values that a module logs to the last row, or begin a row.

        Lightning counts steps from 0, or takes the step from a value named "step". It calls this
        after TrainingLog has written the row of the same step.
        """
        names = metrics.keys() - {"epoch"}
        if not names:
            return
        if all(name.startswith("test") for name in names):
            self.add_to_last_row({name: metrics[name] for name in names})
            return
        step = int(step or 0)
        if self.table is None:
            self.table = MetricsTable(self.path, step)
        last = self.table.last_row
        if last and (self.has_training_log or step < last["step"]):
            step = last["step"]
        self.table.add(step, self._rename_collisions(metrics, last))

    def _rename_collisions(self, metrics: Metrics, last: Row) -> Row:
        """Return the values of a module under names that TrainingLog does not use."""
        if not self.has_training_log:
            return dict(metrics)
        values = {}
        for name, value in metrics.items():
            if name in (*KEY_COLUMNS, *TRAINING_COLUMNS) or name.startswith("hardware/"):
                name = f"module/{name}"
            values[name] = value
        # Lightning adds the epoch to the values of a module, as TrainingLog does to its row.
        epoch = values.pop("module/epoch", None)
        if epoch is not None and "epoch" not in last:
            values["epoch"] = epoch
        return values

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def save(self) -> None:
        """Hand the last row to the operating system, which keeps it if this process is killed."""
        if self.table is not None:
            self.table.save()

    @rank_zero_only
    def sync(self) -> None:
        """Put all rows on the disk, where they survive a power cut."""
        if self.table is not None:
            self.table.save()
            self.table.sync()

    def finalize(self, status: str) -> None:
        self.sync()


class ScalarWriter:
    """Add scalars to metrics.csv, with the method of TensorBoard's writer."""

    def __init__(self, logger: MetricsCsv) -> None:
        self.logger = logger

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        """Add a value to the last row; do nothing before the first row."""
        if isinstance(scalar_value, Tensor):
            scalar_value = scalar_value.item()
        if self.logger.table is not None:
            self.logger.log_metrics({tag: float(scalar_value)}, self.logger.table.step)


class MetricsTable:
    """A CSV file of which only the last row may still change; the others stay on the disk.

    Args:
        end: the last step whose row is kept. The first save removes the rows of later steps.
    """

    def __init__(self, path: Path, end: float) -> None:
        self.path = path
        self.columns = read_columns(path) or list(KEY_COLUMNS)
        self.earlier_names: set[str] = set()  # columns with a value before the last row
        self.last_row: Row = {}
        self.offset: int | None = None  # bytes before the last row; None: rewrite the file
        self.is_saved = not path.exists()
        for row in read_rows(path):
            if row["step"] <= end:
                self.earlier_names |= self.last_row.keys()
                self.last_row = row

    @property
    def step(self) -> int:
        """The step of the last row; 0 if there is none."""
        return self.last_row.get("step", 0)

    def add(self, step: int, values: Row) -> None:
        """Add values to the last row, or begin a row."""
        if step != self.last_row.get("step"):
            self.save()
            self.offset = 0
            if self.path.exists():
                self.offset = self.path.stat().st_size
            self.last_row = {"step": step}
        self.last_row.update(values)
        self.is_saved = False

    def save(self) -> None:
        """Write the last row in place of its earlier version in the file."""
        if self.is_saved:
            return
        new = [name for name in self.last_row if name not in self.columns]
        self.columns += new
        if new or self.offset is None or not self.path.exists():
            self.rewrite()
            return
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            # Write first, then cut. A kill between the two leaves the new row whole, and the end of
            # the old row after it. That line has fewer cells than a row, so readers skip it.
            file.write(self._line(self.last_row))
            file.flush()
            file.truncate()
        self.is_saved = True

    def sync(self) -> None:
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def rewrite(self) -> None:
        """Write the whole file anew: the rows before the last one, and then the last one."""

        def write(file: Any) -> None:
            file.write(encode_line(self.columns))
            for row in read_rows(self.path):
                if row["step"] < self.step:
                    file.write(self._line(row))
            self.offset = file.tell()
            if self.last_row:
                file.write(self._line(self.last_row))

        write_atomically(self.path, write, binary=True)
        self.is_saved = True

    def _line(self, row: Row) -> bytes:
        return encode_line(row.get(name, "") for name in self.columns)


def encode_line(cells: Iterable[Any]) -> bytes:
    """Return a line of CSV."""
    text = io.StringIO(newline="")
    csv.writer(text).writerow(cells)
    return text.getvalue().encode(errors="backslashreplace")


def read_cells(file: Iterable[str]) -> Iterator[list[str]]:
    """Return the cells of each line, without the zero bytes that a power cut may leave."""
    return csv.reader(line.replace("\0", "") for line in file)


def read_columns(path: Path) -> list[str]:
    """Return the column names of a metrics.csv; empty if there is no file, or no column `step`."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        columns = next(read_cells(file), [])
    return columns if "step" in columns else []


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows without their empty cells, and skip damaged and shortened lines."""
    columns = read_columns(path)
    if not columns:
        return
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for cells in read_cells(file):
            if len(cells) != len(columns):
                continue
            pairs = zip(columns, cells, strict=True)
            row: Row = {name: cell for name, cell in pairs if cell}
            step = row.get("step", "")
            if step.isascii() and step.isdecimal():
                row["step"] = int(step)
                yield row
