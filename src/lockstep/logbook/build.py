"""Write what people read of a run: its summary in run.json, its page and its logbook folder."""

import csv
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.logbook.figures import panels_with_lines, run_panels, why_no_curves, write_figure
from lockstep.logbook.folders import (
    NOTE_MARKS,
    RecordedRun,
    config_of,
    holds_run,
    is_url,
    read_run,
)
from lockstep.logbook.index import read_runs, write_index
from lockstep.logbook.render import render
from lockstep.logbook.sweep_page import read_sweeps, write_sweep_page
from lockstep.process.errors import UserError
from lockstep.process.files import write_atomically
from lockstep.process.redact import redact, redact_diff, redact_text
from lockstep.records.metric_names import split_stage
from lockstep.records.proof_table import proof_of_run
from lockstep.records.record import RunRecord, as_json, locked_record, write_record_as_is

# The record holds the confusion matrix and the scores if there are at most so many classes.
MAX_CONFUSION = 50
MAX_CLASSES = 1000
# The pictures that a run writes while it trains and tests.
PICTURES = ("batch.png", "mistakes.png")
# The most rows of metrics.csv in the logbook, besides rows with validations.
MAX_ROWS = 300


def summarise(folder: Path) -> RecordedRun:
    """Summarise the files of a run folder as the values that pages print, and return the run.

    The summary is written into run.json, except while the run is alive and writes there itself.
    """
    run = read_run(folder)
    if run.status == "running":
        run.record.summary = summary_of(run)
        return run
    path = folder / "run.json"
    with locked_record(path):
        run = read_run(folder)
        run.record.summary = summary_of(run)
        write_record_as_is(path, run.record)
    return run


def summary_of(run: RecordedRun) -> dict[str, Any]:
    """Return the values that pages print, without None, {} and []."""
    record = run.record
    summary = {
        "folder": run.relative_folder,
        "tensorboard": (run.folder / "tensorboard").is_dir(),
        "best": record.best_checkpoint.metric,
        "errors": _standard_errors(record),
        "gpu_percent": _mean_of_medians(record, "gpu", "utilisation_percent"),
        "cpu_percent": _mean_of_medians(record, "cpu", "percent"),
        "lost_steps": sum(restart.lost_steps or 0 for restart in record.restarts),
        "changed": record.summary.get("changed"),
        **_scores_and_confusion(run.folder / "confusion_matrix.csv"),
    }
    return {key: value for key, value in summary.items() if value not in (None, {}, [])}


def add_report(folder: Path, title: str, address: str) -> None:
    """Link an interactive report from the page of a run. The caller holds the record's lock.

    Args:
        address: a file, or a URL.
    """
    run = read_run(folder)
    if not is_url(address):
        address = os.path.relpath(address, folder)
    run.record.reports[title] = address
    write_record_as_is(folder / "run.json", run.record)
    write_page(run)


def _standard_errors(record: RunRecord) -> dict[str, float]:
    """Return {"test/acc": 0.004, …} for each metric that is a share of counted images.

    A task that counts pixels or labels logs no number of images. The method is that of Agresti and
    Coull (1998). It adds two right and two wrong images, so that 9 of 9 has an error, too.
    """
    errors = {}
    for stage in ("val", "test"):
        images = int(record.metrics.get(f"{stage}/images") or 0)
        for name in (f"{stage}/acc", f"{stage}/acc_top5"):
            share = record.metrics.get(f"{name}_best", record.metrics.get(name))
            if images and isinstance(share, int | float) and 0 <= share <= 1:
                share = (share * images + 2) / (images + 4)
                errors[name] = round(math.sqrt(share * (1 - share) / (images + 4)), 6)
    return errors


def _mean_of_medians(record: RunRecord, device: str, what: str) -> float | None:
    """Return the mean of a measured value's medians over the devices of all nodes."""
    medians = []
    for node in record.hardware.get("nodes") or []:
        for name, stats in (node.get("stats") or {}).items():
            if name.startswith(device) and name.endswith(f"/{what}"):
                medians.append(stats["p50"])
    return round(sum(medians) / len(medians), 1) if medians else None


def _scores_and_confusion(path: Path) -> dict[str, Any]:
    """Return the scores of each class and, if the classes are few, the confusion matrix."""
    if not path.is_file():
        return {}
    with path.open(newline="", errors="replace") as file:
        head, *rows = csv.reader(file)
    names = head[-len(rows) :]
    counts = [list(map(int, row[-len(rows) :])) for row in rows]
    classes: dict[str, Any] = {}
    if len(rows) <= MAX_CLASSES:
        scores = class_scores(counts)
        classes["classes"] = [[name, *row] for name, row in zip(names, scores, strict=True)]
    if len(rows) <= MAX_CONFUSION:
        classes["confusion"] = {"names": names, "counts": counts}
    return classes


class ClassScores(NamedTuple):
    """The scores of a class: shares from 0 to 1, or None if no image was counted."""

    images: int
    precision: float | None
    recall: float | None
    f1: float | None


def class_scores(confusion: Sequence[Sequence[int]]) -> list[ClassScores]:
    """Return the scores of each class.

    Args:
        confusion: numbers of images, with a row for each true class and a column for each
            predicted one.
    """
    scores = []
    columns = zip(*confusion, strict=True)
    for number, (row, column) in enumerate(zip(confusion, columns, strict=True)):
        right = row[number]
        images = sum(row)
        predicted = sum(column)
        f1 = _ratio(2 * right, images + predicted)
        scores.append(ClassScores(images, _ratio(right, predicted), _ratio(right, images), f1))
    return scores


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def write_page(run: RecordedRun) -> Path:
    """Write page.md and curves.svg from the record. The user's words on the page stay."""
    has_curves = write_figure(run.folder / "curves.svg", run_panels(run))
    text = render(
        "run.md.j2",
        run=run,
        note_marks=NOTE_MARKS,
        has_curves=has_curves,
        no_curves=why_no_curves(run),
        pictures=[name for name in PICTURES if (run.folder / name).is_file()],
    )
    return _write_text(run.folder / "page.md", text)


def keep_run(folder: Path, logbook: Path, address: str = "") -> Path:
    """Copy the files that a reader needs of a run into the logbook, without secrets, and list it.

    Args:
        address: the address of the run, if `folder` is a copy of its small files.

    Returns:
        The path of its page.
    """
    # "." and ".." have no name of their own.
    folder = folder.resolve()
    target = logbook / folder.name
    if target.resolve() == folder:
        raise UserError(f"{folder} is in the logbook already.")
    # run.json of a live run may have no summary. The copy has one in any case.
    run = summarise(folder)
    _refuse_other_run(run, target)
    if address:
        run.record.summary["folder"] = address
    _add_proof(run)
    run.record.reports = _reports_of_copy(run, target)
    _copy_files(run, target)

    page = write_page(read_run(target))
    write_index(logbook)
    return page


def _refuse_other_run(run: RecordedRun, target: Path) -> None:
    """Refuse to overwrite another run that has the same id."""
    if (target / "run.json").exists() and not holds_run(target, run):
        raise UserError(
            f"{target} is another run of this id: remove it first, with logbook.py remove "
            f"{target.name}."
        )


def _add_proof(run: RecordedRun) -> None:
    """Add the newest proof of the run's experiment to its summary, if prove.py has written one."""
    # A run folder is logs/train/runs/<run_id>. The folder of a sweep's job is one level deeper.
    for logs in run.folder.parents[2:4]:
        proof = proof_of_run(run.record, logs)
        if proof:
            run.record.summary["proof"] = proof
            return


def _copy_files(run: RecordedRun, target: Path) -> None:
    """Copy record, curves, diff, pictures, and the page for the user's words into the logbook."""
    record = as_json(run.record) | {"config": config_of(run.folder)}
    _write_text(target / "run.json", json.dumps(redact(record), indent=1, default=str) + "\n")
    if panels_with_lines(run_panels(run)):
        rows = _fewer_rows(run.text("metrics.csv"), run.record.monitor or "")
        _write_text(target / "metrics.csv", rows)
    if run.text("code.diff"):
        _copy_diff(run.folder / "code.diff", target / "code.diff")
    for name in PICTURES:
        _copy_picture(run.folder / name, target / name)

    kept = RecordedRun(target, run.record)
    if kept.title == run.run_id and not kept.note:
        # If nobody has written on the page of the copy, it gets the words on the run's own page.
        _write_text(target / "page.md", redact_text(run.text("page.md")))


def _reports_of_copy(run: RecordedRun, target: Path) -> dict[str, str]:
    """Return the interactive reports that a reader of the logbook can open, relative to `target`.

    These are URLs and files in the logbook. Other files of this machine are left out.
    """
    reports = {}
    logbook = target.parent.resolve()
    for title, address in run.record.reports.items():
        if is_url(address):
            reports[title] = address
            continue
        path = (run.folder / address).resolve()
        if path.is_relative_to(logbook):
            reports[title] = os.path.relpath(path, logbook / target.name)
    return reports


def _copy_diff(source: Path, target: Path) -> None:
    """Copy a diff without secrets. Line ends and bytes that are no UTF-8 stay."""
    diff = redact_diff(source.read_bytes().decode(errors="surrogateescape"))
    content = diff.encode(errors="surrogateescape")
    write_atomically(target, lambda file: file.write(content), binary=True)


def _copy_picture(source: Path, target: Path) -> None:
    if source.is_file():
        content = source.read_bytes()
        write_atomically(target, lambda file: file.write(content), binary=True)


def _fewer_rows(metrics: str, monitor: str) -> str:
    """Return metrics.csv with the rows of validations and at most MAX_ROWS other rows.

    Args:
        monitor: the metric that chooses the best checkpoint, which may have any name.
    """
    head, *lines = metrics.splitlines()
    names = next(csv.reader([head]))
    validated = []
    for number, name in enumerate(names):
        stage, _ = split_stage(name)
        if stage == "val" or (name == monitor and stage != "train"):
            validated.append(number)
    interval = math.ceil(len(lines) / MAX_ROWS)
    # The rows are counted from the end, so that the last one is chosen.
    chosen = set(range(len(lines) - 1, -1, -interval))
    for number, row in enumerate(csv.reader(lines)):
        # A row that was torn by the end of a process has too few cells.
        if any(column < len(row) and row[column] for column in validated):
            chosen.add(number)
    return "\n".join([head, *(lines[number] for number in sorted(chosen))]) + "\n"


def build(logbook: Path) -> list[str]:
    """Write all pages of the logbook again. Return a sentence for each unreadable folder."""
    runs, errors = read_runs(logbook)
    for run in runs:
        write_page(run)
    errors += write_sweep_pages(logbook)
    write_index(logbook)
    return errors


def write_sweep_pages(logbook: Path) -> list[str]:
    """Write the pages of all sweeps. Return a sentence for each unreadable folder."""
    sweeps, errors = read_sweeps(logbook)
    for sweep in sweeps:
        write_sweep_page(sweep.folder)
    return errors


def _write_text(path: Path, text: str) -> Path:
    write_atomically(path, lambda file: file.write(text))
    return path
