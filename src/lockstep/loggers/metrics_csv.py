"""The logger that writes metrics.csv: one row per log point, over all starts of a run.

Its steps are unique and rise. Rows are appended; only the last one may still change, so that a log
point costs the same after a week. Lightning's CSVLogger deletes the file of an earlier start; this
one continues it.
"""

import csv
import io
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lockstep.process.files import write_atomically

KEY_COLUMNS = ("step", "epoch", "time_s")
# With KEY_COLUMNS they are the columns that TrainingLog fills.
STEP_COLUMNS = ("train/loss", "lr", "images_per_s")
Row = dict[str, Any]
Metrics = dict[str, float]


class MetricsCsv(Logger):
    """Write metrics.csv, and go on with the file of an earlier start of the run.

    `TrainingLog` makes the rows. What a module logs under the name of one of its columns gets a
    column of its own, `module/<name>`. Without TrainingLog the module's values make the rows.
    """

    name = "csv"  # type: ignore[assignment]
    version = ""  # type: ignore[assignment]

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self.table: Table | None = None  # until the first value of this start
        self.has_training_log = False

    @property
    def experiment(self) -> "ScalarWriter":
        """Return the object to which a module gives scalars itself, without `self.log`."""
        return ScalarWriter(self)

    @rank_zero_only
    def begin_at(self, step: int, *, replaces_loss: bool = False) -> None:
        """Remove the rows of steps that were lost, and the results of tests: training goes on.

        Args:
            step: optimizer steps at which this start begins.
            replaces_loss: the next row repeats the steps of a row that a stop made within an epoch.
        """
        self.has_training_log = True
        self.table = Table(self.path)
        self.table.drop_rows_after(step)
        if replaces_loss and self.table.step == step:
            for name in STEP_COLUMNS:
                self.table.last_row.pop(name, None)
        # A test ends a run, in its last row. A module may log such a name while it trains.
        logged: set[str] = set()
        for row in read_rows(self.path):
            if row["step"] < self.table.step:
                logged |= row.keys()
        tests = [name for name in self.table.columns if name.startswith("test")]
        self.table.rewrite(without=[name for name in tests if name not in logged])

    @rank_zero_only
    def write_row(self, values: Row, step: int) -> None:
        """Add TrainingLog's values to the row of a step, and make the row if it is a new one."""
        self.has_training_log = True
        if self.table is None:
            self.begin_at(step)
        assert self.table is not None
        self.table.add(max(step, self.table.step), values)
        self.table.save()

    @rank_zero_only
    def add_to_last_row(self, values: Row) -> None:
        """Add the results of a test, which ends a run; no row is removed."""
        if self.table is None:
            self.table = Table(self.path)
            self.table.drop_rows_after(math.inf)
        self.table.add(self.table.step, values)

    @rank_zero_only
    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Take the values that a module logs.

        Lightning counts their steps from 0, or takes them from a value named "step". They come
        after TrainingLog's row of the same step, and belong to it.
        """
        names = metrics.keys() - {"epoch"}
        if not names:
            return
        if all(name.startswith("test") for name in names):
            self.add_to_last_row({name: metrics[name] for name in names})
            return
        step = int(step or 0)
        if self.table is None:
            self.table = Table(self.path)
            self.table.drop_rows_after(step)
        last = self.table.last_row
        if last and (self.has_training_log or step < last["step"]):
            step = last["step"]
        self.table.add(step, self._without_collisions(metrics, last))

    def _without_collisions(self, metrics: Metrics, last: Row) -> Row:
        """Return a module's values under names that TrainingLog does not use."""
        if not self.has_training_log:
            return dict(metrics)
        values = {}
        for name, value in metrics.items():
            if name in (*KEY_COLUMNS, *STEP_COLUMNS) or name.startswith("hardware/"):
                name = f"module/{name}"
            values[name] = value
        # Lightning adds the epoch, which is TrainingLog's as well.
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
    """Take scalars that a module gives a logger itself, as TensorBoard's writer does."""

    def __init__(self, logger: MetricsCsv) -> None:
        self.logger = logger

    def add_scalar(self, tag: str, scalar_value: Any, *_: Any, **__: Any) -> None:
        """Add the value to the row of the present step; before the first step there is none."""
        if isinstance(scalar_value, Tensor):
            scalar_value = scalar_value.item()
        if self.logger.table is not None:
            self.logger.log_metrics({tag: float(scalar_value)}, self.logger.table.step)


class Table:
    """A CSV file of which only the last row may still change; the others stay on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = read_columns(path) or list(KEY_COLUMNS)
        self.last_row: Row = {}
        self.offset = 0  # of the last row in the file, in bytes
        self.is_saved = True

    @property
    def step(self) -> int:
        """The step of the last row; 0 if there is none."""
        return self.last_row.get("step", 0)

    def drop_rows_after(self, step: float) -> None:
        """Drop the rows after a step; the last of the others becomes the row that may change."""
        for row in read_rows(self.path):
            if row["step"] <= step:
                self.last_row = row
        if self.path.exists():
            self.rewrite()

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
        """Write the last row over what the file holds of it."""
        if self.is_saved:
            return
        new = [name for name in self.last_row if name not in self.columns]
        if new or not self.path.exists():
            self.columns += new
            self.rewrite()
            return
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            # Write first, then cut: a kill between the two leaves the row whole, and a rest of the
            # old one, which has fewer cells than a row and is skipped.
            file.write(self._line(self.last_row))
            file.flush()
            file.truncate()
        self.is_saved = True

    def sync(self) -> None:
        if self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def rewrite(self, without: Sequence[str] = ()) -> None:
        """Write the whole file anew, because it has a new column or rows that go.

        Args:
            without: columns whose cells become empty.
        """
        end = self.last_row.get("step", -1)
        blank = dict.fromkeys(without, "")
        for name in without:
            self.last_row.pop(name, None)

        def write(file: Any) -> None:
            file.write(encode_line(self.columns))
            for row in read_rows(self.path):
                if row["step"] < end:
                    file.write(self._line(row | blank))
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
    """Return the cells of each line; a power cut may leave zero bytes, which are no cells."""
    return csv.reader(line.replace("\0", "") for line in file)


def read_columns(path: Path) -> list[str]:
    """Return the head of a metrics.csv; empty if there is no file, or none with steps."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        columns = next(read_cells(file), [])
    return columns if "step" in columns else []


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows without empty cells; a damaged or shortened line is skipped."""
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
