"""The page of one run in its own folder: page.md with its pictures beside it. Nothing under logbook/ changes."""

from pathlib import Path

from lockstep.pages import figures
from lockstep.pages.entry import Entry
from lockstep.pages.experiment_page import run_section
from lockstep.pages.facts import RunFacts
from lockstep.pages.markdown import blocks
from lockstep.pages.source import import_run, write_if_changed
from lockstep.runs.errors import UserError
from lockstep.runs.files import sha256_of
from lockstep.runs.folder import RunFolder

HEAD = "<!-- Written at the run's end. `python src/logbook.py keep RUN` takes it into the logbook, which is in git. -->"


def shows_record(folder: RunFolder) -> bool:
    """Whether the page was written from the record as it is now; by content, as clocks are set back."""
    try:
        return record_mark(folder) in folder.page.read_text(errors="replace")
    except OSError:
        return False


def record_mark(folder: RunFolder) -> str:
    """
    Raises:
        UserError: there is no record.
    """
    try:
        return f"<!-- of the record {sha256_of(folder.record)[:16]} -->"
    except FileNotFoundError:
        raise UserError(f"{folder.path} is no run folder: it has no {folder.record.name}.") from None


def write_run_page(path: Path) -> Path:
    """
    Returns:
        Where the page lies.
    Raises:
        UserError, OSError: the caller logs it and goes on: a page never changes a run's exit code.
    """
    folder = RunFolder(path)
    mark = record_mark(folder)
    facts = RunFacts(import_run(path))
    pictures = (folder.curves_image.name, folder.confusion_image.name, folder.calibration_image.name)
    entry = Entry(facts, page=folder.page.name, pictures=pictures)
    parts = {
        folder.page: blocks([HEAD, mark, run_section(entry, None)]),
        folder.curves_image: figures.run_figure(facts) if entry.has_curves else "",
        folder.confusion_image: figures.confusion_figure(facts),
        folder.calibration_image: figures.calibration_figure(facts),
    }
    for file, text in parts.items():
        if text:
            write_if_changed(file, text, kept=False)
    return folder.page
