"""Read run folders in logs/ and logbook/, and find the run that a word of the command line names."""

import csv
import html
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.runs.config import flatten
from lockstep.runs.errors import UserError
from lockstep.runs.folder import no_such_run, read_config, run_folders
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import RunRecord, read_record, status_of

STAGES = ("val", "test")
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]  # steps and values
NOTE = ("<!-- Write your own words below: they stay when the page is written anew. -->", "<!-- End of your words -->")


@dataclass
class Run:
    """A run folder with its record."""

    folder: Path
    record: RunRecord

    @property
    def run_id(self) -> str:
        return self.folder.name

    @cached_property
    def title(self) -> str:
        """The heading of page.md, which the user may change; at first the run id."""
        heading = re.match("# (.+)\n", self.text("page.md"))
        return html.unescape(heading[1]) if heading else self.run_id

    @cached_property
    def note(self) -> str:
        """The user's own words on page.md."""
        return self.text("page.md").partition(NOTE[0])[2].partition(NOTE[1])[0].strip()

    @property
    def place(self) -> str:
        """The folder, relative to the repository if it is inside."""
        return str(self.folder.relative_to(REPOSITORY) if self.folder.is_relative_to(REPOSITORY) else self.folder)

    @property
    def borrowed(self) -> list[str]:
        """The folders beside the code that hold the run's data and weights: the first parts of relative paths."""
        paths = (self.config.get("data.root"), self.config.get("model.weights"), self.record.initial_weights)
        return sorted({str(path).split("/")[0] for path in paths if path and not re.match("/|~|[a-z0-9]+:", str(path))})

    @property
    def best_value(self) -> Any:
        return self.record.summary.get("best", {}).get(self.record.monitor)

    @property
    def test_value(self) -> Any:
        """The monitored metric in the test."""
        monitor = re.sub("^val[/_]", "", self.record.monitor)
        return next((self.record.metrics.get(test) for metric, _, test in self.results if metric == monitor), None)

    @property
    def results(self) -> list[tuple[str, str, str]]:
        """Return (metric, its name in validation, in test), the monitored one first, then accuracy and loss."""
        rows: dict[str, list[str]] = {}
        monitor = self.record.monitor
        for name in [*self.record.summary.get("best", {}), *self.record.metrics]:
            stage, metric = split_stage(name)
            if name == monitor and stage not in STAGES:
                stage, metric = "val", name
            if stage in STAGES and not metric.endswith("_best") and metric not in ("images", "correct"):
                rows.setdefault(metric, ["", ""])[STAGES.index(stage)] = name
        found = [(metric, val, test) for metric, (val, test) in rows.items()]
        return sorted(found, key=lambda row: (monitor not in row, row[0] != "acc", row[0] != "loss", row[0]))

    @property
    def status(self) -> str:
        status = status_of(self.record)
        is_memory = "memory" in (self.record.error.message or "").lower()
        return "out of memory" if status == "failed" and is_memory else status

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return {"optimizer.lr": 0.001, …}; empty if the folder has no readable config."""
        return flatten(self.record.config or config_of(self.folder))

    @cached_property
    def metrics(self) -> dict[str, Curve]:
        """The columns of metrics.csv over steps, including `epoch` and `time_s`, without unreadable cells."""
        head, *rows = list(csv.reader(self.text("metrics.csv").replace("\0", "").splitlines())) or [[]]
        whole = [[_number(cell) for cell in row] for row in rows if len(row) == len(head)]  # a torn row is left out
        columns = dict(zip(head, np.array(whole).T, strict=True)) if whole else {}
        steps, found = columns.pop("step", np.array(np.nan)), {}
        for name, values in columns.items():
            if (known := np.isfinite(steps) & np.isfinite(values)).any():
                found[name] = (steps[known], values[known])
        return found

    def text(self, name: str) -> str:
        """Return the text of a file, empty if there is none."""
        path = self.folder / name
        return path.read_text(errors="replace").strip() if path.is_file() else ""

    def value(self, name: str) -> Any:
        """Return a metric, an option or a field of the record, as `val/acc`, `optimizer.lr` or `cost.usd`."""
        for held in (self.record.metrics, self.record.summary, self.config):
            if name in held:
                return held[name]
        found: Any = self if name in ("status", "best_value", "test_value") else self.record
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        return found


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def split_stage(name: str) -> tuple[str, str]:
    """Return the stage and the metric of `val/acc` or `val_acc`; no stage if the name has none."""
    found = re.match("(train|val|test)[/_]", name)
    return (found[1], name[found.end() :]) if found else ("", name)


def read_run(folder: Path) -> Run:
    return Run(folder.resolve(), read_record(folder / "run.json"))


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.yaml of a run folder; an empty mapping if it is missing or unreadable."""
    try:
        return read_config(folder / "config.yaml")
    except UserError:
        return {}


def find_run(word: str, *roots: Path) -> Path:
    """Return the folder of the run that `word` names: a folder, a run id, or a part of one; the first root counts."""
    if (Path(word) / "run.json").exists():
        return Path(word)
    folders = {path.name: path for root in reversed(roots) for path in run_folders(root)}
    names = [word] if word in folders else sorted(name for name in folders if word in name)
    if not names:
        raise no_such_run(word, folders.values(), *roots)
    if len(names) > 1:
        shown = ", ".join(["…"] * (len(names) > 5) + names[-5:])
        raise UserError(f"{word!r} means {len(names)} runs ({shown}): give more of the run id.")
    return folders[names[0]]
