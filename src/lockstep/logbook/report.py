"""Make one self-contained HTML file with interactive curves of some runs.

It opens from a disk, from S3 and on a phone. Its parts are in static/: report.html, report.css,
report.js, and uPlot (MIT, uPlot.LICENSE).
"""

import html
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook.compare import Row, caution_about_runs, result_rows, setting_rows
from lockstep.logbook.figures import thin_curve
from lockstep.logbook.folders import RecordedRun, labels_of
from lockstep.logbook.render import metric
from lockstep.process.redact import redact

STATIC = Path(__file__).parent / "static"
MAX_POINTS = 400  # of a curve
# The most panels of metrics that are not in PANELS.
MAX_OTHERS = 24
# Title and unit of each metric.
PANELS = {
    "train/loss": ("Training loss", ""),
    "val/loss": ("Validation loss", ""),
    "val/acc": ("Validation accuracy", "share"),
    "val/acc_top5": ("Validation accuracy, top 5", "share"),
    "train/acc": ("Training accuracy", "share"),
    "lr": ("Learning rate", ""),
    "images_per_s": ("Images per second", ""),
    "hardware/gpu_percent": ("GPU utilisation", "percent"),
    "hardware/gpu_memory_gib": ("GPU memory in GiB", ""),
    "hardware/cpu_percent": ("CPU utilisation", "percent"),
}
NO_PANEL = {"epoch", "time_s", "val/correct", "val/images"}


def report_html(title: str, runs: Sequence[RecordedRun]) -> str:
    """Return the text of the whole file. The same runs give the same bytes."""
    parts = {
        "TITLE": html.escape(title).replace("@", "&#64;"),
        "STYLE": _read_static("uPlot.min.css") + _read_static("report.css"),
        "UPLOT": _read_static("uPlot.iife.min.js"),
        "SCRIPT": _read_static("report.js"),
        "DATA": _to_script_json(page_data(runs)),
    }
    page = _read_static("report.html")
    for placeholder, text in parts.items():
        page = page.replace(f"@{placeholder}@", text)
    return page


def _read_static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def _to_script_json(data: dict[str, Any]) -> str:
    """Return data as JSON for a script element.

    Its escapes keep texts of a run from ending the element, and from looking like a placeholder.
    """
    text = json.dumps(redact(data), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for character in "<>&@":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def page_data(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the data that report.js draws."""
    caution = caution_about_runs(runs)
    labels = labels_of(runs)
    run_ids = ("Run", [run.run_id for run in runs])
    return {
        "subtitle": f"{len(runs)} run{'s' if len(runs) != 1 else ''}",
        "cautions": [caution] if caution else [],
        "runs": [_run_data(run, label) for run, label in zip(runs, labels, strict=True)],
        "panels": [_panel(name) for name in _drawn_metrics(runs)],
        "numbers": _table(["", *labels], [run_ids, *result_rows(runs)]),
        "settings": _table(["option", *labels], setting_rows(runs)),
    }


def _drawn_metrics(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics of PANELS first, and then other logged metrics that change."""
    logged: set[str] = set()
    changing: set[str] = set()
    for run in runs:
        logged |= run.metrics.keys()
        for name, (_, values) in run.metrics.items():
            if len(set(values)) > 1:
                changing.add(name)

    others = sorted(changing - PANELS.keys() - NO_PANEL)
    return [name for name in PANELS if name in logged] + others[:MAX_OTHERS]


def _panel(name: str) -> dict[str, Any]:
    title, unit = PANELS.get(name, (name, ""))
    return {
        "key": name,
        "title": title,
        "unit": unit,
        "loss": "loss" in name,
        "smooth": name != "lr",
    }


def _table(head: list[str], rows: Sequence[Row]) -> dict[str, Any]:
    return {"head": head, "rows": [[name, *cells] for name, cells in rows], "none": "none"}


def _run_data(run: RecordedRun, label: str) -> dict[str, Any]:
    curves = {}
    for name, curve in run.metrics.items():
        steps, values = thin_curve(curve, MAX_POINTS)
        curves[name] = [_six_digits(steps), _six_digits(values)]
    return {
        "run_id": run.run_id,
        "label": label,
        "command": run.record.command or "",
        "note": run.note,
        "headline": _headline(run),
        "curves": curves,
        "confusion": run.record.summary.get("confusion"),
    }


def _six_digits(values: Iterable[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _headline(run: RecordedRun) -> str:
    """Return the first there is of: monitored metric in the test, its best value, status."""
    best = run.best_value if run.test_value is None else run.test_value
    if best is None:
        return run.status
    return metric(best, run.record.monitor)
