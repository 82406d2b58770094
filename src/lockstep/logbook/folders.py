"""Runs as their folders hold them, in logs/ and in logbook/, and which run a word of the command line names."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.logbook import curves
from lockstep.runs import folder as run_folder
from lockstep.runs.errors import UserError
from lockstep.runs.folder import no_such_run, run_folders
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import RunRecord, read_record, status_of
from lockstep.runs.redact import redact

# Options that differ between any two runs, or that say where and not how a run trained
NOT_COMPARED = (
    "paths", "hydra", "run_id", "resume", "resume_step", "task_name", "tags", "ckpt_path", "initial_weights",
    "overrides", "sweep_dir", "experiment_name", "optimized_metric", "logbook", "hardware", "verbose", "quiet",
)  # fmt: skip


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
        """The first line of note.md if it is a heading, else the run id."""
        first = self.text("note.md").partition("\n")[0]
        return first.removeprefix("# ").strip() if first.startswith("# ") else self.run_id

    @property
    def note(self) -> str:
        """The user's own words, without the title."""
        text = self.text("note.md")
        return text if self.title == self.run_id else text.partition("\n")[2].strip()

    @property
    def place(self) -> str:
        """The folder, from the repository if it lies inside."""
        inside = self.folder.is_relative_to(REPOSITORY)
        return str(self.folder.relative_to(REPOSITORY) if inside else self.folder)

    @property
    def commands(self) -> str:
        """The shell lines that repeat the run with its own code."""
        commit, tree = self.record.code.get("commit"), f"../{self.run_id}"
        lines = [f"git worktree add {tree} {commit}"] if commit else []
        if commit and self.record.code.get("dirty"):
            lines.append(f'git -C {tree} apply "$(realpath {self.place}/code.diff)"')
        return "\n".join([*lines, *([f"cd {tree}"] if lines else []), self.record.command or "# unknown"])

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
        rows: dict[str, dict[str, str]] = {}
        monitor = self.record.monitor
        for name in [*self.record.summary.get("best", {}), *self.record.metrics]:
            stage, metric = split_stage(name)
            if name == monitor and stage not in ("val", "test"):
                stage, metric = "val", name
            if stage in ("val", "test") and not metric.endswith("_best") and metric not in ("images", "correct"):
                rows.setdefault(metric, {})[stage] = name
        found = [(metric, row.get("val", ""), row.get("test", "")) for metric, row in rows.items()]
        return sorted(found, key=lambda row: (monitor not in row, row[0] != "acc", row[0] != "loss", row[0]))

    @property
    def status(self) -> str:
        status = status_of(self.record)
        is_memory = "memory" in (self.record.error.message or "").lower()
        return "out of memory" if status == "failed" and is_memory else status

    @cached_property
    def config(self) -> dict[str, Any]:
        """Return {"optimizer.lr": 0.001, …}; empty if the folder has no readable config."""
        return flatten(self.record.config or read_config(self.folder / "config.yaml"))

    @cached_property
    def metrics(self) -> dict[str, curves.Curve]:
        return curves.metrics(self.folder)

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace").strip() if path.is_file() else ""

    def files(self, pattern: str) -> list[str]:
        return sorted(path.name for path in self.folder.glob(pattern))

    def value(self, name: str) -> Any:
        """Return a metric, an option or a field of the record, as `val/acc`, `optimizer.lr` or `cost.usd`."""
        for held in (self.record.metrics, self.record.summary, self.config):
            if name in held:
                return held[name]
        found: Any = self if name in ("status", "best_value", "test_value") else self.record
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        return found


def split_stage(name: str) -> tuple[str, str]:
    """Return the stage and the metric of `val/acc` or `val_acc`; no stage if the name has none."""
    found = re.fullmatch("(?:(train|val|test)[/_])?(.*)", name)
    return (found[1] or "", found[2]) if found else ("", name)


def read_run(folder: Path) -> Run:
    """Return the run in `folder`; raise UserError if it holds none."""
    return Run(folder.resolve(), read_record(folder / "run.json"))


def read_config(path: Path) -> dict[str, Any]:
    """Return a config.yaml; an empty mapping if it is missing or unreadable."""
    try:
        return run_folder.read_config(path)
    except UserError:
        return {}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"trainer.devices": 2, …}; a list is one value."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    parts = (flatten(value, f"{prefix}.{key}".lstrip(".")) for key, value in tree.items())
    return {key: value for part in parts for key, value in part.items()}


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return {option: [value in each flat config]} for the options that differ; None where a config lacks one."""
    found = {
        key: [config.get(key) for config in configs] for key in sorted({key for config in configs for key in config})
    }
    return {
        key: values
        for key, values in found.items()
        if len(set(map(json.dumps, values))) > 1
        and key.partition(".")[0] not in NOT_COMPARED
        and not key.endswith(("cache_dir", "download_dir"))
    }


def changes(recipe: dict[str, Any], config: dict[str, Any], overrides: Sequence[str]) -> dict[str, list[list[Any]]]:
    """Return rows of [option, recipe's value, value here]: `changed` by the command line, `changed_along` with it."""
    here = flatten(redact(config))
    found = differences([flatten(redact(recipe)), here])
    typed = []
    for word in overrides:
        key = word.partition("=")[0].lstrip("+~").partition("@")[0]
        names = [f"choices.{key}"] if f"choices.{key}" in here else [n for n in found if f"{n}.".startswith(f"{key}.")]
        typed += [[name.removeprefix("choices."), *found.pop(name)] for name in names if name in found]
    return {"changed": typed, "changed_along": [[name, *values] for name, values in found.items()]}


def find_run(word: str, *roots: Path) -> Path:
    """Return the folder of the run that `word` names: a folder, a run id, a part of one, or a note's title.

    Raises:
        UserError: there is no such run, or more than one; of a run in several roots the first one counts.
    """
    if (Path(word) / "run.json").exists():
        return Path(word)
    folders = {path.name: path for root in reversed(roots) for path in run_folders(root)}
    parts = [path for name, path in folders.items() if word in name or word == Run(path, RunRecord()).title]
    found = [folders[word]] if word in folders else parts
    if len(found) > 1:
        names = ["…"] * (len(found) > 5) + sorted(path.name for path in found)[-5:]
        raise UserError(f"{word!r} means {len(found)} runs ({', '.join(names)}): give more of the run id.")
    if not found:
        raise no_such_run(word, folders.values(), *roots)
    return found[0]
