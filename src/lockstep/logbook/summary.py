"""Compute what follows from a run's files, once when the run ends, and write it into run.json; pages print it."""

import csv
import math
from pathlib import Path
from typing import Any

from lockstep.logbook.folders import Run, read_run, split_stage
from lockstep.runs.record import RunRecord, save_record
from lockstep.runs.scores import class_scores

MAX_CONFUSION, MAX_CLASSES = 50, 1000  # classes whose confusion matrix, and whose scores, go into the record


def summarise(folder: Path) -> Run:
    """Derive the values that pages print from the files in a run folder, and write them into its run.json."""
    run = read_run(folder)
    record = run.record
    summary = {
        "folder": run.place,
        "tensorboard": (folder / "tensorboard").is_dir(),
        "best": _best(run),
        "errors": _standard_errors(record),
        "gpu_percent": _mean_of_medians(record, "gpu", "utilisation_percent"),
        "cpu_percent": _mean_of_medians(record, "cpu", "percent"),
        "lost_steps": sum(restart.lost_steps or 0 for restart in record.restarts),
        "changed": record.summary.get("changed"),
        **_classes(folder / "confusion_matrix.csv"),
    }
    record.summary = {key: value for key, value in summary.items() if value not in (None, {}, [])}
    save_record(folder / "run.json", record)
    return run


def _best(run: Run) -> dict[str, float]:
    """Return the validation metrics of the best checkpoint, by the row of metrics.csv at its step."""
    record, step, best = run.record, run.record.best_checkpoint.step, {}
    for name, (steps, values) in run.metrics.items():
        if (split_stage(name)[0] == "val" or name == record.monitor) and step in steps:
            best[name] = float(values[steps == step][-1])
    for name, value in record.metrics.items():
        if name.endswith("_best") and not isinstance(value, str):
            best[name.removesuffix("_best")] = value
    return best | {
        name: value for name, value in (record.best_checkpoint.metric or {}).items() if name == record.monitor
    }


def _standard_errors(record: RunRecord) -> dict[str, float]:
    """Return {"test/acc": 0.004, …} for each metric that is a share of counted images, by Agresti and Coull (1998).

    Two right and two wrong images are added, so that 9 of 9 is no certainty.
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
