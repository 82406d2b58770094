"""From run folders to `logbook/runs/*.json`, and from those to the pages: `python src/logbook.py build`.

A page depends on the sources and notes alone, so a rebuild without news changes no byte.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lockstep.pages.json_values import as_text, mapping
from lockstep.pages.page_set import write_pages
from lockstep.pages.source import (
    Source,
    dump,
    import_run,
    read_source,
    read_sources,
    read_yaml,
    source_path,
    write_if_changed,
)
from lockstep.runs import files
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, read_json, status_of
from lockstep.runs.typed_json import from_json


def record_run(run_folder: Path, logbook_dir: Path) -> None:
    """Take one run into the logbook and rewrite the pages that show it; runs beside it that were lost come along.

    Raises:
        UserError, OSError: the caller logs it and goes on: a page never changes a run's exit code.
    """
    with locked(logbook_dir):
        changed = {import_folder(run_folder, logbook_dir)}
        neighbours = [*lost_beside(run_folder, logbook_dir), *running_beside(run_folder, logbook_dir)]
        changed |= {import_folder(folder, logbook_dir) for folder in neighbours}
        write_pages(logbook_dir, {run_id for run_id in changed if run_id})


def record_lost(run_folder: Path, logbook_dir: Path) -> None:
    """The pages of runs beside this one that died without a word; does nothing where there is none."""
    if lost := lost_beside(run_folder, logbook_dir):
        with locked(logbook_dir):
            changed = {import_folder(folder, logbook_dir) for folder in lost}
            write_pages(logbook_dir, {run_id for run_id in changed if run_id})


def build(
    logbook_dir: Path,
    run_folders: Iterable[Path] = (),
    now: str | None = None,
    shown_as: Mapping[Path, str] | None = None,
) -> list[Path]:
    """Import the given run folders and write every page; returns the files that changed.

    Args:
        shown_as: for a folder that is only a copy, the address that the pages name instead.
    Raises:
        UserError: a folder is no run folder, or a source under runs/ cannot be read.
    """
    with locked(logbook_dir):
        for folder in run_folders:
            import_folder(folder, logbook_dir, (shown_as or {}).get(folder))
        return write_pages(logbook_dir, None, now)


def write_some_pages(logbook_dir: Path, changed_runs: set[str]) -> list[Path]:
    """After a note, a comparison or a report: the pages that show one of these runs."""
    with locked(logbook_dir):
        return write_pages(logbook_dir, changed_runs)


def known_runs(logbook: Path) -> dict[str, str]:
    """Run id → when its record was last written."""
    return {source["run_id"]: _updated_at(source) for source in read_sources(logbook)}


@contextmanager
def locked(logbook: Path) -> Iterator[None]:
    """One writer at a time on this machine; the lock lies on the folder itself and dies with the process."""
    logbook.mkdir(parents=True, exist_ok=True)
    handle = os.open(logbook, os.O_RDONLY)
    try:
        with files.locked(handle):
            yield
    finally:
        os.close(handle)


def import_folder(folder: Path, logbook: Path, shown_as: str | None = None) -> str | None:
    """The run's id; None where the logbook holds a newer state of it than the folder does."""
    source = import_run(folder)
    if shown_as is not None:
        source["folder"] = shown_as
    path = source_path(logbook, source["run_id"])
    if path.exists() and _updated_at(read_source(path)) > _updated_at(source):
        return None
    write_if_changed(path, dump(source))
    return source["run_id"]


def _updated_at(source: Source) -> str:
    return as_text(mapping(source.get("record")).get("updated_at"))


def run_folders_under(logs: Path) -> list[Path]:
    """Every run folder of runs and sweeps, or `logs` itself where it is one."""
    if (logs / "run.json").exists():
        return [logs]
    patterns = (
        "train/runs/*/run.json", "train/multiruns/*/*/run.json", "eval/runs/*/run.json", "runs/*/run.json",
        "*/run.json",
    )  # fmt: skip
    return sorted({path.parent for pattern in patterns for path in logs.glob(pattern)})


def belongs_here(folder: Path, logbook: Path) -> bool:
    """False for a run that was told to keep its pages in another logbook."""
    paths = read_yaml(RunFolder(folder).config).get("paths")
    chosen, root = (paths.get(key) if isinstance(paths, dict) else None for key in ("logbook_dir", "root_dir"))
    if not isinstance(chosen, str) or Path(chosen).resolve() == logbook.resolve():
        return True
    # The default, of a clone on another machine or in another place: its logs were copied here.
    return isinstance(root, str) and Path(chosen) == Path(root) / "logbook" and not Path(chosen).exists()


def running_beside(run_folder: Path, logbook: Path) -> list[Path]:
    """Neighbours that the logbook shows as running, from an hour ago perhaps: what they are now."""
    found = []
    for path in sorted(run_folder.parent.glob("*/run.json")):
        known = source_path(logbook, path.parent.name)
        if path.parent == run_folder or not known.exists() or known.stat().st_mtime >= path.stat().st_mtime:
            continue
        with contextlib.suppress(UserError):
            read_json(path)
            if mapping(read_source(known).get("record")).get("status") == "running":
                found.append(path.parent)
    return found


def lost_beside(run_folder: Path, logbook: Path) -> list[Path]:
    """Neighbours that died without a word: nobody else would ever write their page."""
    lost = []
    for path in sorted(run_folder.parent.glob("*/run.json")):
        known = source_path(logbook, path.parent.name)
        if path.parent == run_folder or (known.exists() and known.stat().st_mtime >= path.stat().st_mtime):
            continue
        try:
            is_lost = status_of(from_json(RunRecord, read_json(path), tolerant=True)) == "lost"
        except UserError:
            continue
        if is_lost and belongs_here(path.parent, logbook):
            lost.append(path.parent)
    return lost
