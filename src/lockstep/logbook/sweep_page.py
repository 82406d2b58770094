"""The page of a sweep: its ranking, its arms beside each other, and a figure, from sweep.json."""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.logbook.arms import CAUTION_ABOUT_SEVERAL, ArmRun, Arms
from lockstep.logbook.figures import write_sweep_figure
from lockstep.logbook.folders import NOTE_MARKS, heading_of, links_from_beside, note_of, read_text
from lockstep.logbook.render import render
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically
from lockstep.process.redact import redact

SWEEP_FILE = "sweep.json"
FIGURE = "arms.svg"
SCHEMA_VERSION = 1
# Sweeps below logs/ and below logbook/.
SWEEPS = (f"*/{SWEEP_FILE}", f"train/multiruns/*/{SWEEP_FILE}")


@dataclass(frozen=True)
class Sweep:
    """A folder with a sweep.json.

    Args:
        record: the content of sweep.json.
        arms: its jobs as arms.
    """

    folder: Path
    record: dict[str, Any]
    arms: Arms

    @property
    def sweep_id(self) -> str:
        return self.folder.name

    @cached_property
    def title(self) -> str:
        """The heading of page.md, which the user may change; at first the sweep's id."""
        return heading_of(read_text(self.folder / "page.md")) or self.sweep_id

    @property
    def note(self) -> str:
        """The user's words on page.md."""
        return note_of(read_text(self.folder / "page.md"))

    @property
    def note_for_other_page(self) -> str:
        """The user's words for a page beside the sweep's folder, with links from there."""
        return links_from_beside(self.note, self.sweep_id)

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """The jobs, the best first and failed ones last. Repeats stay in their order."""
        jobs: list[dict[str, Any]] = self.record["jobs"]
        if self.arms.has_only_repeats:
            return jobs
        sign = 1 if self.arms.minimize else -1
        return sorted(
            jobs, key=lambda job: (job["value"] is None, sign * (job["value"] or 0), job["number"])
        )

    @property
    def result(self) -> str:
        """The outcome of the arms, for the logbook's list of sweeps."""
        compared = [f"{item.arm}: {item.sentence}" for item in self.arms.comparisons]
        return "; ".join(compared or self.arms.winner_lines() or [f"{len(self.jobs)} jobs"])

    def page_of(self, run_id: str) -> str:
        """Return the address of a job's page relative to this page, or ""."""
        # A resumed search has trials in the folder of the search that began them.
        other_sweep = run_id.rpartition("_")[0]
        folders = (run_id, f"../{run_id}", f"../{other_sweep}/{run_id}")
        for address in (f"{folder}/page.md" for folder in folders):
            if (self.folder / address).is_file():
                return address
        return ""


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep of a folder.

    Raises:
        UserError: its sweep.json is missing, or cannot be read.
    """
    path = folder.resolve() / SWEEP_FILE
    try:
        record = json.loads(path.read_bytes())
        if record["schema_version"] > SCHEMA_VERSION:
            raise UserError(f"{path} is of a newer version of the code: update the code.")
        runs = [_arm_run(job) for job in record["jobs"]]
        arms = Arms(runs, str(record["metric"]), bool(record["minimize"]))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is not the record of a sweep: {error!r}.") from None
    return Sweep(path.parent, record, arms)


def _arm_run(job: dict[str, Any]) -> ArmRun:
    return ArmRun(
        run_id=str(job["run_id"]),
        arm=str(job["arm"]),
        repeat=str(job["repeat"]),
        value=_parse_number(job["value"]),
        test_value=_parse_number(job["tested"]),
        fold_ratio=float(job["fold_ratio"]),
    )


def _parse_number(value: Any) -> float:
    return math.nan if value is None else float(value)


def write_sweep_page(folder: Path) -> Path:
    """Write page.md and its figure. The user's heading and words on the page stay."""
    sweep = read_sweep(folder)
    page = sweep.folder / "page.md"
    has_figure = write_sweep_figure(sweep.folder / FIGURE, sweep.arms, numeric_keys(sweep.record))
    text = render(
        "sweep.md.j2",
        sweep=sweep,
        arms=sweep.arms,
        about_several=CAUTION_ABOUT_SEVERAL,
        figure=FIGURE if has_figure else "",
        note=sweep.note,
        note_marks=NOTE_MARKS,
    )
    write_atomically(page, lambda file: file.write(text))
    return page


def numeric_keys(record: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return {"optimizer.lr": {"run_a": 0.1, "run_b": 0.2}}: the keys that all arms set to numbers.

    With more than two such keys it is {}, because the picture of one key would mix the others.
    """
    columns: dict[str, dict[str, float]] = {}
    for job in record["jobs"]:
        for word in str(job["arm"]).split():
            key, _, value = word.partition("=")
            try:
                columns.setdefault(key, {})[str(job["run_id"])] = float(value)
            except ValueError:
                continue
    everywhere = {
        key: column for key, column in columns.items() if len(column) == len(record["jobs"])
    }
    return everywhere if len(everywhere) <= 2 else {}


def sweep_folders(root: Path) -> list[Path]:
    """Return the folders of all sweeps below logs/ or logbook/."""
    folders = set()
    for pattern in SWEEPS:
        folders |= {path.parent for path in root.glob(pattern)}
    return sorted(folders)


def find_sweep(name: str, *roots: Path, is_path: bool = True) -> Path | None:
    """Return the folder of a sweep, by its path or its id; None if there is none.

    Args:
        is_path: the name may be a folder anywhere.
    """
    if is_path and (Path(name) / SWEEP_FILE).is_file():
        return Path(name)
    for root in roots:
        for folder in sweep_folders(root):
            if folder.name == name:
                return folder
    return None


def keep_sweep(folder: Path, logbook: Path) -> Path:
    """Copy a sweep into the logbook, without secrets and without its runs; return its page."""
    target = logbook / folder.resolve().name
    if target.resolve() == folder.resolve():
        raise UserError(f"{folder} is in the logbook already.")
    sweep = read_sweep(folder)
    if (target / SWEEP_FILE).exists() and _are_different_sweeps(read_sweep(target), sweep):
        raise UserError(
            f"{target} is another sweep of this name: remove it first, with logbook.py remove "
            f"{target.name}, or give {folder} another name."
        )
    text = json.dumps(redact(sweep.record), indent=1) + "\n"
    target.mkdir(parents=True, exist_ok=True)
    write_atomically(target / SWEEP_FILE, lambda file: file.write(text))
    page = target / "page.md"
    if not page.exists() and (sweep.folder / "page.md").exists():
        # Only the user's words count. The rest of the page is written anew.
        before = read_text(sweep.folder / "page.md") + "\n"
        write_atomically(page, lambda file: file.write(before))
    return write_sweep_page(target)


def _are_different_sweeps(first: Sweep, second: Sweep) -> bool:
    """Return whether two sweeps have no job in common. A sweep that went on has more jobs."""
    ids_of_first = _ids_of_jobs(first)
    ids_of_second = _ids_of_jobs(second)
    # Older sweeps have no ids.
    if not ids_of_first or not ids_of_second:
        return False
    return ids_of_first.isdisjoint(ids_of_second)


def _ids_of_jobs(sweep: Sweep) -> set[str]:
    return {job["uuid"] for job in sweep.record["jobs"] if job.get("uuid")}


def read_sweeps(logbook: Path) -> tuple[list[Sweep], list[str]]:
    """Return the sweeps of a logbook, the newest first, and a sentence for each unreadable one."""
    sweeps = []
    errors = []
    for folder in sweep_folders(logbook):
        try:
            sweeps.append(read_sweep(folder))
        except UserError as error:
            errors.append(str(error))
    return sweeps[::-1], errors
