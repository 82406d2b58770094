"""What follows from a run's files, computed once when the run ends and written into run.json; pages only print it."""

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.logbook.folders import Run, differences, flatten, read_config, read_run
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, save_record
from lockstep.runs.redact import redact
from lockstep.runs.scores import class_scores

MAX_CLASSES = 1000  # whose scores go into the record
MAX_CONFUSION = 50  # classes whose confusion matrix goes into the record


def summarise(folder: Path) -> Run:
    """Derive the values that pages print from the files in a run folder, and write them into its run.json.

    Raises:
        UserError: the folder holds no record.
    """
    run, files = read_run(folder), RunFolder(folder)
    record = run.record
    _add_device_statistics(run)
    summary = {
        "folder": run.place,
        "tensorboard": files.tensorboard.is_dir(),
        "best": _best(run),
        "errors": standard_errors(record),
        "gpu_percent": _mean_of_medians(record, "gpu", "utilisation_percent"),
        "cpu_percent": _mean_of_medians(record, "cpu", "percent"),
        "lost_steps": sum(restart.lost_steps or 0 for restart in record.restarts),
        "downtime_s": sum(restart.downtime_s or 0 for restart in record.restarts),
        **_changes(run, folder / "defaults.yaml"),
        **_classes(files.confusion_matrix),
    }
    record.summary = {key: value for key, value in summary.items() if value not in (None, {}, [])}
    save_record(files.record, record)
    return run


def _best(run: Run) -> dict[str, float]:
    """The validation metrics of the best checkpoint, by the row of metrics.csv at its step."""
    record = run.record
    step, name = record.best_checkpoint.step, record.monitor
    at_step = {
        metric: float(values[steps == step][-1])
        for metric, (steps, values) in run.metrics.items()
        if metric.startswith("val/") and step is not None and (steps == step).any()
    }
    known = record.best_checkpoint.metric.get(name, record.metrics.get(f"{name}_best"))
    best = {**at_step, **({name: known} if isinstance(known, int | float) else {})}
    if "val/acc_best" in record.metrics:
        best.setdefault("val/acc", float(record.metrics["val/acc_best"]))
    return best


def standard_errors(record: RunRecord) -> dict[str, float]:
    """Return {"test/acc": 0.004, …} for each metric that is a share of counted images."""
    found = {}
    for stage, images in (("val", record.num_val), ("test", record.num_test)):
        images = int(record.metrics.get(f"{stage}/images") or images or 0)
        for name in (f"{stage}/acc", f"{stage}/acc_top5"):
            share = record.metrics.get(f"{name}_best", record.metrics.get(name))
            if images and isinstance(share, int | float) and 0 <= share <= 1:
                found[name] = round(math.sqrt(share * (1 - share) / images), 6)
    return found


def _add_device_statistics(run: Run) -> None:
    """Replace the statistics of the last start by those of all starts, and set the peak of the fullest device."""
    record = run.record
    nodes = record.hardware.get("nodes") or []
    for place, node in enumerate(nodes):
        prefix = f"node{node.get('node_rank', place)}/"
        stats = node.setdefault("stats", {})
        for name, (_, values) in run.samples.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and len(values) and (record.restarts or key not in stats):
                stats[key] = {"p50": round(float(np.median(values)), 3), "max": round(float(values.max()), 3)}
    for device in ("gpu",) if record.accelerator == "gpu" else ("gpu", "rank"):
        peaks = [value["max"] for name, value in _stats(record, device, "memory_gib") if value.get("max") is not None]
        if peaks:
            record.peak_memory_gib = round(max(peaks), 3)
            return


def _stats(record: RunRecord, device: str, what: str) -> list[tuple[str, dict[str, Any]]]:
    nodes = record.hardware.get("nodes") or []
    every = [(name, stats) for node in nodes for name, stats in (node.get("stats") or {}).items()]
    return [(name, stats) for name, stats in every if name.startswith(device) and name.endswith(f"/{what}")]


def _mean_of_medians(record: RunRecord, device: str, what: str) -> float | None:
    """The mean over devices of their median; `cpu/percent` of a node is one device, its single cores are none."""
    found = [s["p50"] for name, s in _stats(record, device, what) if s.get("p50") is not None and name[:4] != "cpu0"]
    return round(sum(found) / len(found), 1) if found else None


def _changes(run: Run, recipe: Path) -> dict[str, list[list[Any]]]:
    """Rows of [option, recipe's value, value here] for the options on the command line, and for all others."""
    configs = [flatten(redact(read_config(path))) for path in (recipe, RunFolder(run.folder).config)]
    found = differences(configs) if configs[0] else {}
    typed = []
    for word in run.record.overrides:
        key = word.partition("=")[0].lstrip("+~").partition("@")[0]
        is_choice = f"choices.{key}" in run.config
        names = [f"choices.{key}"] if is_choice else [name for name in found if f"{name}.".startswith(f"{key}.")]
        typed += [[name.removeprefix("choices."), *found.pop(name)] for name in names if name in found]
    return {"changed": typed, "changed_along": [[name, *values] for name, values in found.items()]}


def _classes(path: Path) -> dict[str, Any]:
    """The scores of each class and, of few classes, the confusion matrix."""
    if not path.is_file():
        return {}
    rows = list(csv.reader(path.read_text(errors="replace").splitlines()))
    if not rows or any(len(row) not in (len(rows), len(rows) - 1) for row in rows):  # cut short by a full disk
        return {}
    try:
        counts = [[int(cell) for cell in row[-len(rows) + 1 :]] for row in rows[1:]]
        names = rows[0][-len(counts) :]
        scores = class_scores(counts)
    except ValueError:
        return {}
    classes = [[name, s.images, s.precision, s.recall, s.f1] for name, s in zip(names, scores, strict=True)]
    return {
        "classes": classes if len(counts) <= MAX_CLASSES else [],
        "confusion": {"names": names, "counts": counts} if len(counts) <= MAX_CONFUSION else {},
    }
