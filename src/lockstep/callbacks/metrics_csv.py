"""Write metrics.csv: one row per log point, its steps unique and rising, also over the restarts of a run.

Lightning's CSVLogger deletes the file of an earlier start; this logger continues it.
"""

import csv
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from lockstep.runs.files import write_atomically

KEYS = ("step", "epoch", "time_s")


class MetricsCsv(Logger):
    """Rows of an earlier start stay, but for those of steps that were lost, which go when TrainingLog begins."""

    name, version = "csv", ""  # type: ignore[assignment]

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path, self.columns, self.rows = Path(path), list(KEYS), list[dict[str, Any]]()
        self.is_begun = False
        if self.path.exists() and rank_zero_only.rank == 0:
            self.columns, self.rows = read_rows(self.path)

    def begin_at(self, step: int) -> None:
        """Remove the rows after the step at which training begins; from now on steps rise."""
        self.rows, self.is_begun = [row for row in self.rows if row["step"] <= step], True

    def log_hyperparams(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: the run folder holds config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add values to the row of their step, which several calls may fill.

        Lightning counts the steps of what self.log brings from 0, or takes them from a value named "step"; these values
        come after TrainingLog's row.
        """
        step = int(step or 0)
        if self.rows and step < self.rows[-1]["step"]:
            if self.is_begun:
                step = self.rows[-1]["step"]
            else:  # without TrainingLog
                self.rows = [row for row in self.rows if row["step"] <= step]
        if not self.rows or step != self.rows[-1]["step"]:
            self.rows.append({"step": step})
        self.rows[-1] |= metrics
        self.columns += [name for name in metrics if name not in self.columns]

    @rank_zero_only
    def save(self) -> None:
        def write(file: Any) -> None:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

        write_atomically(self.path, write)

    def finalize(self, status: str) -> None:
        self.save()


def read_rows(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the columns and the rows of a metrics.csv; a line that was cut short is skipped."""
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        reader = csv.DictReader((line.replace("\0", "") for line in file), restkey="", restval="")
        if "step" not in (columns := list(reader.fieldnames or [])):
            return list(KEYS), []
        rows = [row for row in reader if row["step"].isascii() and row["step"].isdecimal() and "" not in row]
    return columns, [{**{name: cell for name, cell in row.items() if cell}, "step": int(row["step"])} for row in rows]
