"""Pages of runs, and the logbook: a folder for each run that is kept, and README.md, which lists them."""

import json
import re
from pathlib import Path

from lockstep.logbook.curves import slim_copy
from lockstep.logbook.figures import run_panels, write_figure
from lockstep.logbook.folders import Run, read_config, read_run
from lockstep.logbook.render import render
from lockstep.logbook.summary import summarise
from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.folder import run_folders
from lockstep.runs.record import read_json
from lockstep.runs.redact import redact, redact_text

TEXTS = ("code.diff", "note.md", "nvidia-smi-*.txt")
MARKS = {"finished": "✅", "failed": "❌", "out of memory": "❌", "interrupted": "⏸", "running": "▶", "lost": "❔"}


def write_run_page(folder: Path) -> Path:
    """Complete a run's record and write its page and curves into its folder."""
    return write_page(summarise(folder))


def write_page(run: Run) -> Path:
    """Write page.md and curves.svg from the record."""
    write_figure(run.folder / "curves.svg", run_panels(run))
    return _write(run.folder / "page.md", render("run.md.j2", run=run, marks=MARKS))


def keep_run(folder: Path, logbook: Path) -> Path:
    """Copy what a reader needs of a run folder into the logbook, without secrets, and list it there.

    Returns:
        The run's page in the logbook.
    """
    target = logbook / folder.name
    summarise(folder)
    target.mkdir(parents=True, exist_ok=True)
    if (folder / "metrics.csv").exists():
        slim_copy(folder / "metrics.csv", target / "metrics.csv")
    for path in (path for pattern in TEXTS for path in folder.glob(pattern)):
        if path.name != "note.md" or not (target / "note.md").exists():
            _write(target / path.name, redact_text(path.read_text(errors="replace")))
    record = {**read_json(folder / "run.json"), "config": read_config(folder / "config.yaml")}
    _write(target / "run.json", json.dumps(redact(record), indent=1) + "\n")
    page = write_page(read_run(target))
    write_index(logbook)
    return page


def build(logbook: Path, logs: Path) -> list[str]:
    """Write all pages of the logbook anew, from the run folders in logs/ where these have changed since.

    Returns:
        A sentence for each folder that cannot be read.
    """
    errors = []
    origins = {folder.name: folder for folder in run_folders(logs)}
    for folder in run_folders(logbook):
        try:
            run, origin = read_run(folder), origins.get(folder.name)
            if origin and str(read_json(origin / "run.json").get("updated_at")) > str(run.record.updated_at):
                keep_run(origin, logbook)
            else:
                write_page(run)
        except UserError as error:
            errors.append(str(error))
    write_index(logbook)
    return errors


def write_index(logbook: Path) -> None:
    """Write README.md: the comparisons, the reports and the runs, the newest first; unreadable runs are left out."""
    runs = []
    for folder in run_folders(logbook):
        try:
            runs.append(read_run(folder))
        except UserError:
            continue  # `build` names it
    runs.sort(key=lambda run: (run.record.started_at or "", run.run_id), reverse=True)
    titles = {path.name: re.search("(?:^# |<title>)(.*?)(?:</title>|$)", path.read_text(), re.MULTILINE)
              for path in sorted(logbook.glob("*.*")) if path.suffix in (".md", ".html")}  # fmt: skip
    pages = {name: title[1] if title else name for name, title in titles.items() if name != "README.md"}
    _write(logbook / "README.md", render("index.md.j2", runs=runs, pages=pages, marks=MARKS))


def _write(path: Path, text: str) -> Path:
    """Write a file if its content changes."""
    data = text.encode("utf-8", "backslashreplace")
    if not path.exists() or path.read_bytes() != data:
        write_atomically(path, lambda file: file.write(data), binary=True)
    return path
