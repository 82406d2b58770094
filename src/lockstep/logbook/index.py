"""Write the logbook's README.md: questions, sweeps, other runs, and a table of all runs."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.logbook.folders import RecordedRun, note_of, read_run
from lockstep.logbook.render import first_sentence, render
from lockstep.logbook.sweep_page import Sweep, read_sweeps
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically
from lockstep.records.folder import run_folders

INDEX = "README.md"
# The heading of a page in markdown, or the title of an interactive report.
HEADING = re.compile("^# (.+)$|<title>(.*?)</title>", re.MULTILINE)
LINK_TO_RUN = re.compile(r"\]\(([^()/\s]+)/page\.md\)")


@dataclass(frozen=True)
class Question:
    """A page that compares runs.

    Attributes:
        name: the name of its file.
        title: its heading.
        answer: the first sentence of the user's words on it; empty if there are none.
        runs: the runs of the logbook that it links.
    """

    name: str
    title: str
    answer: str
    runs: Sequence[RecordedRun]


@dataclass(frozen=True)
class Report:
    """An HTML file with interactive curves."""

    name: str
    title: str


def write_index(logbook: Path) -> None:
    """Write README.md: questions with answers, sweeps, other runs, and a table of all runs."""
    runs, _ = read_runs(logbook)
    sweeps, _ = read_sweeps(logbook)
    questions = read_questions(logbook, runs)
    text = render(
        "index.md.j2",
        questions=questions,
        reports=read_reports(logbook),
        sweeps=sweeps,
        other_runs=runs_with_notes(runs, questions, sweeps),
        runs=runs,
    )
    write_atomically(logbook / INDEX, lambda file: file.write(text))


def read_runs(logbook: Path) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs of a logbook, the newest first, and a sentence for each unreadable folder."""
    runs = []
    errors = []
    for folder in run_folders(logbook):
        try:
            runs.append(read_run(folder))
        except UserError as error:
            errors.append(str(error))
    runs.sort(key=lambda run: (run.record.started_at or "", run.run_id), reverse=True)
    return runs, errors


def read_questions(logbook: Path, runs: Sequence[RecordedRun]) -> list[Question]:
    """Return the comparisons of a logbook by their file names, the answered ones first."""
    run_of = {run.run_id: run for run in runs}
    questions = []
    for path in sorted(logbook.glob("*.md")):
        if path.name == INDEX:
            continue
        text = path.read_text(errors="replace")
        run_ids = dict.fromkeys(LINK_TO_RUN.findall(text))
        question = Question(
            name=path.name,
            title=_read_title(text) or path.name,
            answer=first_sentence(note_of(text)),
            runs=[run_of[run_id] for run_id in run_ids if run_id in run_of],
        )
        questions.append(question)
    return sorted(questions, key=lambda question: not question.answer)


def read_reports(logbook: Path) -> list[Report]:
    reports = []
    for path in sorted(logbook.glob("*.html")):
        reports.append(
            Report(path.name, _read_title(path.read_text(errors="replace")) or path.name)
        )
    return reports


def _read_title(text: str) -> str:
    """Return the heading or the title of a page without its escapes, or ""."""
    match = HEADING.search(text)
    return html.unescape(match[1] or match[2] or "") if match else ""


def runs_with_notes(
    runs: Sequence[RecordedRun], questions: Sequence[Question], sweeps: Sequence[Sweep]
) -> list[RecordedRun]:
    """Return the runs with words of the user that no question and no sweep links."""
    linked: set[str] = set()
    for question in questions:
        linked |= {run.run_id for run in question.runs}
    for sweep in sweeps:
        linked |= {str(job["run_id"]) for job in sweep.jobs}
    return [run for run in runs if run.note and run.run_id not in linked]
