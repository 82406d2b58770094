"""Write what a run leaves to read: the summary in run.json, its page, its folder in the logbook, and the list."""

import csv
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook.figures import drawn, run_panels, write_figure
from lockstep.logbook.folders import NOTE, Run, config_of, read_run
from lockstep.logbook.render import render
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically
from lockstep.process.redact import redact, redact_text
from lockstep.records.folder import run_folders
from lockstep.records.record import RunRecord, as_json, locked_record, save_record

MARKS = {"finished": "✅", "failed": "❌", "out of memory": "❌", "interrupted": "⏸", "running": "▶", "lost": "❔"}
MAX_CONFUSION, MAX_CLASSES = 50, 1000  # classes whose confusion matrix, and whose scores, go into the record
MAX_ROWS = 300  # of metrics.csv in the logbook, beside those of validations


def summarise(folder: Path) -> Run:
    """Derive the values that pages print from the files in a run folder.

    They go into its run.json, but for a run that is alive: its trainer alone writes there.
    """
    run = read_run(folder)
    if run.status == "running":
        run.record.summary = summary_of(run)
        return run
    path = folder / "run.json"
    with locked_record(path):
        run = read_run(folder)
        run.record.summary = summary_of(run)
        save_record(path, run.record)
    return run


def summary_of(run: Run) -> dict[str, Any]:
    """Return what pages print, without empty values."""
    record = run.record
    summary = {
        "folder": run.place,
        "tensorboard": (run.folder / "tensorboard").is_dir(),
        "best": record.best_checkpoint.metric,
        "errors": _standard_errors(record),
        "gpu_percent": _mean_of_medians(record, "gpu", "utilisation_percent"),
        "cpu_percent": _mean_of_medians(record, "cpu", "percent"),
        "lost_steps": sum(restart.lost_steps or 0 for restart in record.restarts),
        "changed": record.summary.get("changed"),
        **_classes(run.folder / "confusion_matrix.csv"),
    }
    return {key: value for key, value in summary.items() if value not in (None, {}, [])}


def add_report(folder: Path, title: str, address: str) -> None:
    """Link an interactive report from the page of a run; the caller holds its record's lock."""
    run = read_run(folder)
    if "://" not in address:
        address = os.path.relpath(address, folder)
    run.record.reports[title] = address
    save_record(folder / "run.json", run.record)
    write_page(run)


def _standard_errors(record: RunRecord) -> dict[str, float]:
    """Return {"test/acc": 0.004, …} for each metric that is a share of counted images, by Agresti and Coull (1998).

    Two right and two wrong images are added, so that 9 of 9 is not certain.
    """
    found = {}
    for stage, number in (("val", record.num_val), ("test", record.num_test)):
        images = int(record.metrics.get(f"{stage}/images") or number or 0)
        for name in (f"{stage}/acc", f"{stage}/acc_top5"):
            share = record.metrics.get(f"{name}_best", record.metrics.get(name))
            if images and isinstance(share, int | float) and 0 <= share <= 1:
                share = (share * images + 2) / (images + 4)
                found[name] = round(math.sqrt(share * (1 - share) / (images + 4)), 6)
    return found


def _mean_of_medians(record: RunRecord, device: str, what: str) -> float | None:
    every = [item for node in record.hardware.get("nodes") or [] for item in (node.get("stats") or {}).items()]
    found = [stats["p50"] for name, stats in every if name.startswith(device) and name.endswith(f"/{what}")]
    return round(sum(found) / len(found), 1) if found else None


def _classes(path: Path) -> dict[str, Any]:
    """Return the scores of each class and, of few classes, the confusion matrix."""
    if not path.is_file():
        return {}
    with path.open(newline="", errors="replace") as file:
        head, *rows = csv.reader(file)
    names, counts = head[-len(rows) :], [[int(cell) for cell in row[-len(rows) :]] for row in rows]
    classes = [[name, *scores] for name, scores in zip(names, class_scores(counts), strict=True)]
    return {
        "classes": classes if len(rows) <= MAX_CLASSES else [],
        "confusion": {"names": names, "counts": counts} if len(rows) <= MAX_CONFUSION else {},
    }


def class_scores(confusion: Sequence[Sequence[int]]) -> list[tuple[int, float | None, float | None, float | None]]:
    """Return (images, precision, recall, F1) of each class, shares from 0 to 1; None where nothing was counted."""

    def share(part: int, whole: int) -> float | None:
        return part / whole if whole else None

    found = []
    for i, (row, column) in enumerate(zip(confusion, zip(*confusion, strict=True), strict=True)):
        right, images, predicted = row[i], sum(row), sum(column)
        found.append((images, share(right, predicted), share(right, images), share(2 * right, images + predicted)))
    return found


def write_page(run: Run) -> Path:
    """Write page.md and curves.svg from the record, with the user's words on the page before."""
    has_curves = write_figure(run.folder / "curves.svg", run_panels(run))
    text = render("run.md.j2", run=run, marks=MARKS, note_marks=NOTE, has_curves=has_curves)
    return _write(run.folder / "page.md", text)


def keep_run(folder: Path, logbook: Path) -> Path:
    """Copy what a reader needs of a run folder into the logbook, without secrets; list it there and return its page."""
    if (target := logbook / folder.name).resolve() == folder.resolve():
        raise UserError(f"{folder} is in the logbook already.")
    run = summarise(folder)
    # The copy has the summary also where run.json of a live run has none.
    record = as_json(run.record) | {"config": config_of(folder)}
    _write(target / "run.json", json.dumps(redact(record), indent=1, default=str) + "\n")
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
    """Write all pages of the logbook again; return a sentence for each folder that cannot be read."""
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
