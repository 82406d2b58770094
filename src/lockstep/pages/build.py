"""From run folders to `logbook/runs/*.json`, and from those to the pages: `python src/logbook.py build`.

A page depends on the sources and notes alone, so a rebuild without news changes no byte.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lockstep.pages.comparison_page import saved_comparisons
from lockstep.pages.entry import experiment_page_name
from lockstep.pages.facts import RunFacts
from lockstep.pages.json_values import as_text, finite, items, mapping
from lockstep.pages.notes import run_note_path
from lockstep.pages.page_set import write_pages
from lockstep.pages.publish import saved_reports
from lockstep.pages.source import (
    Source,
    dump,
    import_run,
    read_source,
    read_sources,
    source_path,
    write_if_changed,
)
from lockstep.runs import files
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, read_json, status_of
from lockstep.runs.typed_json import from_json


def keep_run(run_folder: Path, logbook_dir: Path) -> Path:
    """Take one run into the logbook, and what has become of runs beside it that the logbook shows as running.

    Returns:
        The page that shows it.
    Raises:
        UserError, OSError: the caller logs it and goes on: a page never changes a run's exit code.
    """
    with locked(logbook_dir):
        run_id = import_folder(run_folder, logbook_dir) or run_folder.name
        changed = {import_folder(folder, logbook_dir) for folder in running_beside(run_folder, logbook_dir)}
        write_pages(logbook_dir, {run_id, *filter(None, changed)})
        return logbook_dir / experiment_page_name(RunFacts(read_source(source_path(logbook_dir, run_id))))


def remove_runs(run_ids: Sequence[str], logbook: Path) -> list[Path]:
    """Take runs out, with their notes and figures; returns the files that changed.

    A comparison that is left with less than two runs goes too, a report that is left with none.
    """
    with locked(logbook):
        gone = [path for run_id in run_ids for path in (source_path(logbook, run_id), run_note_path(logbook, run_id))]
        known = {source["run_id"] for source in read_sources(logbook)} - set(run_ids)
        gone += [path for path, runs in comparison_files(logbook).items() if len(known & set(runs)) < 2]
        gone += [path for path, runs in report_files(logbook).items() if runs and not known & set(runs)]
        gone = [path for path in gone if path.exists()]
        for path in gone:
            path.unlink()
        return gone + write_pages(logbook, None)


def comparison_files(logbook: Path) -> dict[Path, list[str]]:
    """{file: the runs that it compares}."""
    return {logbook / "comparisons" / f"{name}.json": held.runs for name, held in saved_comparisons(logbook).items()}


def report_files(logbook: Path) -> dict[Path, tuple[str, ...]]:
    """{file: the runs that it shows}: what names a report, and the report where it lies beside it."""
    files = {}
    for report in saved_reports(logbook):
        files[logbook / "reports" / f"{report.name}.json"] = report.runs
        if report.uri == f"reports/{report.name}.html":
            files[logbook / report.uri] = report.runs
    return files


def kept_folders(logs: Path, logbook: Path) -> list[Path]:
    """Folders under `logs` of runs that the logbook holds."""
    return [folder for folder in run_folders_under(logs) if source_path(logbook, folder.name).exists()]


def lost_folders(logs: Path, logbook: Path) -> list[Path]:
    """Of runs that were started with logbook=keep and died without a word, so that the logbook does not hold them."""
    found = []
    for folder in run_folders_under(logs):
        if source_path(logbook, folder.name).exists() or not _asked_to_be_kept(folder):
            continue
        with contextlib.suppress(UserError):
            record = from_json(RunRecord, read_json(RunFolder(folder).record), tolerant=True)
            if status_of(record) == "lost":
                found.append(folder)
    return found


def _asked_to_be_kept(folder: Path) -> bool:
    try:
        return "\nlogbook: keep\n" in RunFolder(folder).config.read_text(errors="replace")
    except OSError:
        return False


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


def not_up_to_date(logbook_dir: Path, run_folders: Iterable[Path] = ()) -> list[str]:
    """Files, as paths from the logbook, that `build` would change; changes nothing itself."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(shutil.copytree(logbook_dir, Path(scratch, "logbook")))
        return [str(path.relative_to(copy)) for path in build(copy, run_folders)]


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
    if path.exists() and _progress(read_source(path)) > _progress(source):
        return None
    write_if_changed(path, dump(source))
    return source["run_id"]


def _progress(source: Source) -> tuple[int, float, bool, str]:
    """How far a run has come, without the clock as far as can be: clocks are set back.

    Restarts only grow in number, steps grow within a start, and then it ends.
    """
    record = mapping(source.get("record"))
    ended = record.get("status") != "running"
    return len(items(record.get("restarts"))), finite(record.get("steps")) or 0.0, ended, _updated_at(source)


def _updated_at(source: Source) -> str:
    return as_text(mapping(source.get("record")).get("updated_at"))


def run_folders_under(logs: Path) -> list[Path]:
    """Every run folder of runs and sweeps, or `logs` itself where it is one."""
    if (logs / "run.json").exists():
        return [logs]
    patterns = ("*/runs/*/run.json", "train/multiruns/*/*/run.json", "runs/*/run.json", "*/run.json")
    return sorted({path.parent for pattern in patterns for path in logs.glob(pattern)})


def running_beside(run_folder: Path, logbook: Path) -> list[Path]:
    """Neighbours that the logbook shows as running, from an hour ago perhaps: what they are now."""
    found = []
    for path in sorted(run_folder.parent.glob("*/run.json")):
        known = source_path(logbook, path.parent.name)
        if path.parent == run_folder or not _says_running(known):
            continue
        with contextlib.suppress(UserError):
            read_json(path)
            if mapping(read_source(known).get("record")).get("status") == "running":
                found.append(path.parent)
    return found


def _says_running(source_file: Path) -> bool:
    """By its text: most runs of a logbook have ended, and need not be parsed."""
    try:
        return b'"status": "running"' in source_file.read_bytes()
    except OSError:
        return False
