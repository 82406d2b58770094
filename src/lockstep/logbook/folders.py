"""Runs as their folders hold them, in logs/ and in logbook/, and which run a word of the command line names."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.logbook import curves
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.foreign_files import read_yaml
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.record import RunRecord, read_record, status_of

# Values that differ between any two runs, or that say where and not how a run trained
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
    def note(self) -> str:
        """The user's own words, as markdown."""
        return self.text("note.md")

    @property
    def title(self) -> str:
        """The note's first line if it is a heading, else the run id."""
        first = self.note.partition("\n")[0]
        return first.removeprefix("# ").strip() if first.startswith("# ") else self.run_id

    @property
    def body(self) -> str:
        """The note without its title."""
        return self.note if self.title == self.run_id else self.note.partition("\n")[2].strip()

    @property
    def place(self) -> str:
        """The folder, from the repository if it lies inside."""
        inside = self.folder.is_relative_to(REPOSITORY)
        return str(self.folder.relative_to(REPOSITORY) if inside else self.folder)

    @property
    def commands(self) -> str:
        """The shell lines that repeat the run with its own code."""
        code, lines = self.record.code, []
        if code.commit:
            lines.append(f"git worktree add ../{self.run_id} {code.commit}")
            if code.dirty:
                lines.append(f'git -C ../{self.run_id} apply "$(realpath {self.place}/code.diff)"')
            lines.append(f"cd ../{self.run_id}")
        return "\n".join([*lines, self.record.command or "# run.json has no command"])

    @property
    def metric_names(self) -> list[str]:
        """The monitored metric, accuracy, loss and all others, without the stage that they were measured in."""
        known = [*self.record.summary.get("best", {}), *self.record.metrics]
        names = {name.partition("/")[2] for name in known if name.startswith(("val/", "test/"))}
        monitor = self.record.monitor.removeprefix("val/")
        counts = ("correct", "images")
        names = {name for name in names if name not in counts and not name.endswith("_best")}
        return sorted(names, key=lambda name: (name != monitor, name != "acc", name != "loss", name))

    @cached_property
    def status(self) -> str:
        failed = status_of(self.record) == "failed" and "memory" in (self.record.error.message or "").lower()
        return "out of memory" if failed else status_of(self.record)

    @cached_property
    def config(self) -> dict[str, Any]:
        """{"optimizer.lr": 0.001, …}; empty if the folder has no readable config.yaml."""
        return flatten(read_config(RunFolder(self.folder).config))

    @cached_property
    def metrics(self) -> dict[str, curves.Curve]:
        return curves.metrics(self.folder)

    @cached_property
    def samples(self) -> dict[str, curves.Curve]:
        return curves.hardware(self.folder)

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
        found: Any = self.record
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else getattr(found, part, None)
        return found


def read_run(folder: Path) -> Run:
    """Return the run in `folder`; raise UserError if it holds none."""
    return Run(folder.resolve(), read_record(folder / "run.json"))


def read_config(path: Path) -> dict[str, Any]:
    """Return a config.yaml; an empty mapping if it is missing or unreadable."""
    try:
        config = read_yaml(path)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return {"trainer.devices": 2, …}; a list is one value."""
    if not isinstance(tree, dict) or (prefix and not tree):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return {key: [value in each config]} for the options in which flat configs differ, None where one lacks a key."""
    keys = sorted({key for config in configs for key in config if key.partition(".")[0] not in NOT_COMPARED})
    found = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in found.items() if len(set(map(json.dumps, values))) > 1}


def folders_under(root: Path) -> list[Path]:
    """Return the folders of all runs and sweep jobs below logs/ or logbook/, or `root` itself if it is one."""
    if (root / "run.json").exists():
        return [root]
    patterns = ("*/run.json", "runs/*/run.json", "*/runs/*/run.json", "train/multiruns/*/*/run.json")
    return sorted({path.parent for pattern in patterns for path in root.glob(pattern)})


def find_run(word: str, *roots: Path) -> Path:
    """Return the folder of the run that `word` names: a folder, a run id, a part of one, or a note's title.

    Args:
        roots: where to look; a run of an earlier root hides one with the same id of a later root.

    Raises:
        UserError: there is no such run, or more than one.
    """
    if (Path(word) / "run.json").exists():
        return Path(word)
    folders = {path.name: path for root in reversed(roots) for path in folders_under(root)}
    named = [path for path in folders.values() if (path / "note.md").exists() and Run(path, RunRecord()).title == word]
    exact = [folders[word]] if word in folders else named
    found = exact or [path for name, path in folders.items() if word in name]
    if len(found) == 1:
        return found[0]
    if found:
        names = ["…"] * (len(found) > 5) + sorted(path.name for path in found)[-5:]
        raise UserError(f"{word!r} means {len(found)} runs ({', '.join(names)}): give more of the run id.")
    near = "".join(f" did you mean {name}?" for name in difflib.get_close_matches(word, folders, 1, cutoff=0.6))
    newest = sorted(folders, key=lambda name: (folders[name] / "run.json").stat().st_mtime)[-3:]
    raise UserError(
        f"There is no run {word!r} in {' or '.join(map(str, roots))};{near} the newest are: "
        f"{', '.join(newest) or 'none yet'}."
    )
