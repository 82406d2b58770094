"""Pages of runs, and the logbook: a folder for each run that is kept, and README.md, which lists them."""

import csv
import json
import re
from pathlib import Path

from lockstep.logbook.figures import drawn, run_panels, write_figure
from lockstep.logbook.folders import NOTE, Run, config_of, read_run
from lockstep.logbook.render import render
from lockstep.logbook.summary import summarise
from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.folder import run_folders
from lockstep.runs.redact import redact, redact_text

MARKS = {"finished": "✅", "failed": "❌", "out of memory": "❌", "interrupted": "⏸", "running": "▶", "lost": "❔"}
MAX_ROWS = 300  # of metrics.csv in the logbook, beside those of validations


def write_run_page(folder: Path) -> Path:
    """Complete a run's record and write its page and curves into its folder."""
    return write_page(summarise(folder))


def write_page(run: Run) -> Path:
    """Write page.md and curves.svg from the record, with the user's words on the page before."""
    has_curves = write_figure(run.folder / "curves.svg", run_panels(run))
    text = render("run.md.j2", run=run, marks=MARKS, note_marks=NOTE, has_curves=has_curves)
    return _write(run.folder / "page.md", text)


def keep_run(folder: Path, logbook: Path) -> Path:
    """Copy what a reader needs of a run folder into the logbook, without secrets; list it there and return its page."""
    run, target = summarise(folder), logbook / folder.name
    record = {**json.loads((folder / "run.json").read_text()), "config": config_of(folder)}
    _write(target / "run.json", json.dumps(redact(record), indent=1) + "\n")
    if drawn(run_panels(run)):
        head, *lines = run.text("metrics.csv").splitlines()
        validated = [i for i, name in enumerate(next(csv.reader([head]))) if name.startswith("val/")]
        every = -(-len(lines) // MAX_ROWS)
        chosen = {*range(len(lines) - 1, -1, -every)}  # the last row among them
        chosen |= {at for at, row in enumerate(csv.reader(lines)) if any(row[i : i + 1] > [""] for i in validated)}
        _write(target / "metrics.csv", "\n".join([head, *(lines[at] for at in sorted(chosen))]) + "\n")
    if run.text("code.diff"):
        _write(target / "code.diff", redact_text((folder / "code.diff").read_text(errors="replace")))
    known = Run(target, run.record)
    if known.title == run.run_id and not known.note:
        _write(target / "page.md", redact_text(run.text("page.md")))  # for the user's words; the rest is written anew
    page = write_page(read_run(target))
    write_index(logbook)
    return page


def readable(logbook: Path) -> tuple[list[Run], list[str]]:
    """Return the runs of a logbook, the newest first, and a sentence for each folder that cannot be read."""
    runs, errors = [], []
    for folder in run_folders(logbook):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            errors.append(str(error))
    return sorted(runs, key=lambda run: (run.record.started_at or "", run.run_id), reverse=True), errors


def build(logbook: Path) -> list[str]:
    """Write all pages of the logbook anew; return a sentence for each folder that cannot be read."""
    runs, errors = readable(logbook)
    for run in runs:
        write_page(run)
    write_index(logbook)
    return errors


def write_index(logbook: Path) -> None:
    """Write README.md: the comparisons, the reports and the runs, the newest first."""
    pages = {}
    for path in sorted([*logbook.glob("*.md"), *logbook.glob("*.html")]):
        title = re.search("(?:^# |<title>)(.*?)(?:</title>|$)", path.read_text(), re.MULTILINE)
        pages[path.name] = title[1] if title else path.name
    pages.pop("README.md", None)
    _write(logbook / "README.md", render("index.md.j2", runs=readable(logbook)[0], pages=pages, marks=MARKS))


def _write(path: Path, text: str) -> Path:
    write_atomically(path, lambda file: file.write(text))
    return path
