"""Read run folders in logs/ and logbook/, and find the run that the command line names."""

import csv
import html
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.records.config import flatten
from lockstep.records.folder import missing_run_error, read_config, run_folders
from lockstep.records.metric_names import split_stage
from lockstep.records.record import RunRecord, is_out_of_memory, read_record, status_of

STAGES = ("val", "test")
# The sign of each status in tables and headings.
SIGNS = {
    "finished": "✅",
    "failed": "❌",
    "out of memory": "❌",
    "interrupted": "⏸",
    "running": "▶",
    "lost": "❔",
}
# Columns of metrics.csv that no task has logged.
NO_METRIC = re.compile("(epoch|time_s|lr|images_per_s)$|hardware/|lr-")
RUN_IN_LOGS = re.compile(r"logs/[^/]+/[^/]+/[^/]+")
# An error lists at most this many runs.
SHOWN_RUNS = 5
# Steps and values of a metric.
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
# The user's own words on a page stand between these two comments.
NOTE_MARKS = (
    "<!-- Write your own words below: they stay when the page is written anew. -->",
    "<!-- End of your words -->",
)


@dataclass(frozen=True)
class ResultRow:
    """A row of the table of results.

    Attributes:
        metric: its name without the stage.
        in_validation: its name in the validation; empty if it was not validated.
        in_test: its name in the test; empty if it was not tested.
    """

    metric: str
    in_validation: str
    in_test: str


@dataclass
class RecordedRun:
    """A run folder with its record."""

    folder: Path
    record: RunRecord

    @property
    def run_id(self) -> str:
        return self.folder.name

    @cached_property
    def title(self) -> str:
        """The heading of page.md, which the user may change; at first the run id."""
        return heading_of(self.text("page.md")) or self.run_id

    @cached_property
    def note(self) -> str:
        """The user's own words on page.md."""
        return note_of(self.text("page.md"))

    @property
    def relative_folder(self) -> str:
        """The address of the folder, relative to the repository if it is inside."""
        if self.folder.is_relative_to(REPOSITORY):
            return str(self.folder.relative_to(REPOSITORY))
        return str(self.folder)

    @property
    def is_copy(self) -> bool:
        """Return whether the folder has only the small files of a run, as those of the logbook."""
        return self.record.summary.get("folder") != self.relative_folder

    @property
    def bucket(self) -> str:
        """The address of the run in a bucket; empty if nothing of it is there."""
        address = str(self.record.summary.get("folder") or "")
        if address.startswith("s3://"):
            return address
        uri = str(self.record.upload.uri or "")
        return uri.rpartition("/")[0].removesuffix("/checkpoints")

    @property
    def tensorboard_address(self) -> str:
        """The address of TensorBoard's files that a reader of the page can open, or "".

        They lie in the bucket, or in the folder of a run that is no copy.
        """
        if not self.record.summary.get("tensorboard"):
            return ""
        if self.bucket:
            return f"{self.bucket}/tensorboard"
        return "" if self.is_copy else f"{self.relative_folder}/tensorboard"

    @property
    def best_checkpoint(self) -> str:
        """The address of the best checkpoint that a reader can open, or ""."""
        best = self.record.best_checkpoint
        in_bucket = best.s3_uri or self.record.upload.uri
        if in_bucket or self.is_copy:
            return str(in_bucket or "")
        return f"{self.relative_folder}/{best.path}"

    @property
    def reports(self) -> dict[str, str]:
        """The interactive reports that exist: URLs, and files beside the run."""
        return {
            title: address
            for title, address in sorted(self.record.reports.items())
            if is_url(address) or os.path.exists(self.folder / address)
        }

    @property
    def linked_folders(self) -> list[str]:
        """The folders of the repository that hold the run's data and weights.

        These are top folders, but a run of logs/, as git has logs/ itself in every worktree.
        """
        paths = (
            self.config.get("data.root"),
            self.config.get("model.weights"),
            self.record.initial_weights,
        )
        # Absolute paths, paths above or in a home folder and URLs lie outside of the repository.
        elsewhere = re.compile(r"/|~|\.\.?(/|$)|[a-z0-9]+:")
        texts = [str(path).removeprefix(f"{REPOSITORY}/") for path in paths if path]
        folders = [os.path.normpath(text) for text in texts]
        linked = set()
        for path in folders:
            if not elsewhere.match(path):
                in_logs = RUN_IN_LOGS.match(path)
                linked.add(in_logs[0] if in_logs else path.split("/")[0])
        return sorted(linked)

    @property
    def best_value(self) -> Any:
        return self.record.summary.get("best", {}).get(self.record.monitor)

    @property
    def test_value(self) -> Any:
        """The monitored metric in the test."""
        monitor = split_stage(self.record.monitor)[1]
        for result in self.results:
            if result.metric == monitor:
                return self.record.metrics.get(result.in_test)
        return None

    @property
    def results(self) -> list[ResultRow]:
        """The metrics of validation and test: the monitored one, then accuracy, loss and others."""
        monitor = self.record.monitor
        best = self.record.summary.get("best", {})
        names: dict[str, dict[str, str]] = {}
        for name in [*best, *self.record.metrics]:
            stage, metric = split_stage(name)
            if name == monitor and stage not in STAGES and name in best:
                stage = "val"
                metric = name
            if stage in STAGES and _is_result(metric):
                names.setdefault(metric, {})[stage] = name

        results = []
        for metric, name_in in names.items():
            results.append(ResultRow(metric, name_in.get("val", ""), name_in.get("test", "")))
        return sorted(results, key=self._order_of_result)

    def _order_of_result(self, result: ResultRow) -> tuple[bool, bool, bool, str]:
        metric = result.metric
        is_monitored = self.record.monitor in (metric, result.in_validation, result.in_test)
        return not is_monitored, metric != "acc", metric != "loss", metric

    @property
    def training_results(self) -> dict[str, Any]:
        """The last training metrics of a run that has validated nothing.

        They come from the record, or from metrics.csv if the record has none yet.
        """
        if any(result.in_validation for result in self.results):
            return {}
        metrics: dict[str, Any] = dict(self.record.metrics)
        if not metrics:
            last = {name: float(values[-1]) for name, (_, values) in self.metrics.items()}
            metrics = {name: value for name, value in last.items() if not NO_METRIC.match(name)}
        return {
            name: value
            for name, value in sorted(metrics.items())
            if split_stage(name)[0] not in STAGES and not name.endswith("_best")
        }

    @property
    def status(self) -> str:
        status = status_of(self.record)
        if status == "failed" and is_out_of_memory(self.record.error.message or ""):
            return "out of memory"
        return status

    @property
    def sign(self) -> str:
        return SIGNS.get(self.status, "")

    @property
    def machine(self) -> str:
        """The GPUs or the CPUs that the run used, as "8 × NVIDIA H100" or "AMD EPYC, 2 cores"."""
        # Several nodes of a test may be one host.
        hosts = {node.get("host"): node for node in self.record.hardware.get("nodes") or ()}
        parts = Counter[str]()
        for host in hosts.values():
            if self.record.accelerator == "gpu":
                parts.update(gpu.get("name") for gpu in host.get("gpus") or ())
            else:
                parts[f"{host.get('cpu')}, {host.get('cores')} cores"] += 1
        return " + ".join(
            part if count == 1 else f"{count} × {part}" for part, count in parts.items()
        )

    @property
    def note_for_other_page(self) -> str:
        """The user's own words for a page beside the run's folder, with links from there."""
        return links_from_beside(self.note, self.run_id)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return the config as {"optimizer.lr": 0.001, …}; {} if it cannot be read."""
        return flatten(self.record.config or config_of(self.folder))

    @cached_property
    def metrics(self) -> dict[str, Curve]:
        """The columns of metrics.csv over steps, including `epoch` and `time_s`.

        Unreadable cells are left out.
        """
        columns = self._columns()
        steps = columns.pop("step", np.array(np.nan))
        curves = {}
        for name, values in columns.items():
            is_readable = np.isfinite(steps) & np.isfinite(values)
            if is_readable.any():
                curves[name] = (steps[is_readable], values[is_readable])
        return curves

    def _columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns of metrics.csv by name; {} if it has no complete row."""
        lines = self.text("metrics.csv").replace("\0", "").splitlines()
        rows = list(csv.reader(lines))
        if not rows:
            return {}

        # A row that was torn by the end of a process has too few cells.
        head = rows[0]
        whole = [row for row in rows[1:] if len(row) == len(head)]
        if not whole:
            return {}
        numbers = np.array([list(map(_parse_number, row)) for row in whole])
        return dict(zip(head, numbers.T, strict=True))

    def text(self, name: str) -> str:
        """Return the text of a file, empty if there is none."""
        return read_text(self.folder / name)

    def value(self, name: str) -> Any:
        """Return a metric, an option, a field of the record, or the option of a group.

        Args:
            name: as `val/acc`, `optimizer.lr`, `cost.usd` or `augmentation`.
        """
        for values in (self.record.metrics, self.record.summary, self.config):
            if name in values:
                return values[name]

        value: Any = vars(self.record)
        if name in ("status", "best_value", "test_value"):
            value = {name: getattr(self, name)}
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return self.config.get(f"choices.{name}") if value is None else value


def read_text(path: Path) -> str:
    """Return the text of a file, empty if there is none."""
    return path.read_text(errors="replace").strip() if path.is_file() else ""


def heading_of(page: str) -> str | None:
    """Return the first heading of a page, which the user may change."""
    heading = re.match("# (.+)", page)
    return html.unescape(heading[1]) if heading else None


def links_from_beside(note: str, folder: str) -> str:
    """Return the words of a folder's page for a page beside the folder, with links from there."""
    return re.sub(r"\]\((?![a-z]+:|[/#])", f"]({quote(folder)}/", note)


def note_of(page: str) -> str:
    """Return the user's own words on a page."""
    begin, end = NOTE_MARKS
    return page.partition(begin)[2].partition(end)[0].strip()


def is_url(address: str) -> bool:
    return "://" in address


def _is_result(metric: str) -> bool:
    """Return whether a metric belongs into a table of results: it is no count and no "_best"."""
    return not metric.endswith("_best") and metric not in ("images", "correct")


def _parse_number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        return np.nan


def holds_run(folder: Path, run: RecordedRun) -> bool:
    """Return whether a folder holds this run, and not another one of its id.

    Runs of older versions have no uuid.
    """
    path = folder / "run.json"
    if not path.exists():
        return False
    uuid = read_record(path).uuid
    return not uuid or not run.record.uuid or uuid == run.record.uuid


def read_run(folder: Path) -> RecordedRun:
    return RecordedRun(folder.resolve(), read_record(folder / "run.json"))


def labels_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the titles of runs. If several runs have one title, the run id follows it."""
    titles = [run.title for run in runs]
    labels = []
    for run in runs:
        is_alone = titles.count(run.title) == 1 or run.title == run.run_id
        labels.append(run.title if is_alone else f"{run.title} ({run.run_id})")
    return labels


def config_of(folder: Path) -> dict[str, Any]:
    """Return the config.yaml of a run folder; {} if it is missing or cannot be read."""
    try:
        return read_config(folder / "config.yaml")
    except UserError:
        return {}


def find_run(name: str, *roots: Path, is_path: bool = True) -> Path:
    """Return the folder of a run.

    Args:
        name: a folder, a run id, or a part of one.
        roots: folders of runs. If several have the run, the first one counts.
        is_path: the name may be a folder anywhere.
    """
    if is_path and (Path(name) / "run.json").exists():
        return Path(name)

    folders = {}
    for root in reversed(roots):
        for path in run_folders(root):
            folders[path.name] = path
    if name in folders:
        return folders[name]

    run_ids = sorted(run_id for run_id in folders if name in run_id)
    if not run_ids:
        raise missing_run_error(name, folders.values(), *roots)
    if len(run_ids) > 1:
        shown = ", ".join(run_ids[-SHOWN_RUNS:])
        if len(run_ids) > SHOWN_RUNS:
            shown = f"…, {shown}"
        raise UserError(f"{name!r} means {len(run_ids)} runs ({shown}): give more of the run id.")
    return folders[run_ids[0]]
