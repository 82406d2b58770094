"""One self-contained HTML file with interactive curves of some runs: it opens from a disk, from S3 and on a phone.

Its parts are in static/: report.html, report.css, report.js, and uPlot (MIT, uPlot.LICENSE).
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook.compare import Row, not_held_fixed, number_rows, setting_rows
from lockstep.logbook.figures import thin
from lockstep.logbook.folders import Run
from lockstep.logbook.render import metric
from lockstep.runs.redact import redact

STATIC = Path(__file__).parent / "static"
MAX_POINTS, MAX_OTHERS = 400, 24
PANELS = {  # metric: title and unit
    "train/loss": ("Training loss", ""), "val/loss": ("Validation loss", ""),
    "val/acc": ("Validation accuracy", "share"), "val/acc_top5": ("Validation accuracy, top 5", "share"),
    "train/acc": ("Training accuracy", "share"), "lr": ("Learning rate", ""),
    "images_per_s": ("Images per second", ""), "hardware/gpu_percent": ("GPU utilisation", "percent"),
    "hardware/gpu_memory_gib": ("GPU memory in GiB", ""), "hardware/cpu_percent": ("CPU utilisation", "percent"),
}  # fmt: skip
NO_PANEL = {"epoch", "time_s", "val/correct", "val/images"}


def report_html(title: str, runs: Sequence[Run]) -> str:
    """Return the whole file; the same runs give the same bytes."""
    data = json.dumps(redact(report_data(runs)), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for mark in "<>&@":  # no text of a run may end the script element or look like a placeholder
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    names = ("report.html", "uPlot.min.css", "report.css", "uPlot.iife.min.js", "report.js")
    page, style, own_style, plot, script = ((STATIC / name).read_text(encoding="utf-8") for name in names)
    parts = {"TITLE": html.escape(title).replace("@", "&#64;"), "STYLE": style + own_style, "UPLOT": plot}
    for mark, text in {**parts, "SCRIPT": script, "DATA": data}.items():
        page = page.replace(f"@{mark}@", text)
    return page


def report_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what report.js draws: known curves first, then whatever else was logged and changes."""
    labels, caution = [run.title for run in runs], not_held_fixed(runs)
    changing = {name for run in runs for name, (_, values) in run.metrics.items() if len(set(values)) > 1}
    names = [name for name in PANELS if any(name in run.metrics for run in runs)]
    panels = []
    for name in names + sorted(changing - PANELS.keys() - NO_PANEL)[:MAX_OTHERS]:
        title, unit = PANELS.get(name, (name, ""))
        panels.append({"key": name, "title": title, "unit": unit, "loss": "loss" in name, "smooth": name != "lr"})

    def table(first: str, rows: Sequence[Row]) -> dict[str, Any]:
        return {"head": [first, *labels], "rows": [[name, *cells] for name, cells in rows], "none": "none"}

    return {
        "subtitle": f"{len(runs)} run{'s' if len(runs) != 1 else ''}", "cautions": [caution] if caution else [],
        "runs": [_run_data(run) for run in runs], "panels": panels,
        "numbers": table("", [("Run", [run.run_id for run in runs]), *number_rows(runs)]),
        "settings": table("option", setting_rows(runs)),
    }  # fmt: skip


def _run_data(run: Run) -> dict[str, Any]:
    best, curves = run.best_value if run.test_value is None else run.test_value, {}
    for name, curve in run.metrics.items():
        curves[name] = [[float(f"{value:.6g}") for value in axis] for axis in thin(curve, MAX_POINTS)]
    return {
        "run_id": run.run_id, "label": run.title, "command": run.record.command or "", "note": run.note,
        "headline": metric(best, run.record.monitor) if best is not None else run.status, "curves": curves,
        "confusion": run.record.summary.get("confusion"),
    }  # fmt: skip
