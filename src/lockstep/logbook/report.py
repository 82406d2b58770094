"""One self-contained HTML file with interactive curves of some runs: it opens from a disk, from S3 and on a phone.

Its parts lie in static/: report.html, report.css, report.js, and uPlot (MIT, uPlot.LICENSE).
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook import curves
from lockstep.logbook.compare import not_held_fixed, number_rows, setting_rows
from lockstep.logbook.folders import Run
from lockstep.logbook.render import metric, number
from lockstep.runs.redact import redact

STATIC = Path(__file__).parent / "static"
MAX_POINTS, MAX_PANELS = 400, 24
PANELS = {
    "train/loss": ("Training loss", ""),
    "val/loss": ("Validation loss", ""),
    "val/acc": ("Validation accuracy", "share"),
    "val/acc_top5": ("Validation accuracy, top 5", "share"),
    "train/acc": ("Training accuracy", "share"),
    "lr": ("Learning rate", ""),
}  # fmt: skip
DEVICES = {
    "gpu": ("GPU utilisation, mean of all devices", "percent", "utilisation_percent"),
    "memory": ("GPU memory in GiB, mean of all devices", "", "memory_gib"),
    "cpu": ("CPU utilisation", "percent", "cpu/percent"),
}


def report_html(title: str, runs: Sequence[Run]) -> str:
    """Return the whole file; the same runs give the same bytes."""
    data = json.dumps(redact(report_data(runs)), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for mark in "<>&@":  # no text of a run may end the script element, or be taken for a part
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    parts = {
        "@TITLE@": html.escape(title).replace("@", "&#64;"),
        "@STYLE@": _static("uPlot.min.css") + _static("report.css"),
        "@UPLOT@": _static("uPlot.iife.min.js"),
        "@SCRIPT@": _static("report.js"),
        "@DATA@": data,
    }
    page = _static("report.html")
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def report_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what report.js draws."""
    labels = [run.title for run in runs]
    caution = not_held_fixed(runs)
    return {
        "subtitle": f"{len(runs)} run{'s' if len(runs) != 1 else ''}",
        "cautions": [caution] if caution else [],
        "runs": [_run_data(run) for run in runs],
        "panels": _panels(runs),
        "numbers": {
            "head": ["", *labels],
            "rows": [["Run", *(run.run_id for run in runs)], *([name, *cells] for name, cells in number_rows(runs))],
        },
        "settings": {
            "head": ["option", *labels],
            "rows": [[name, *cells] for name, cells in setting_rows(runs)],
            "none": "none: the same options",
        },
        "hardware": {
            "head": ["run", "node", "measured", "median", "maximum"],
            "rows": [row for run in runs for row in _hardware_rows(run)],
        },
    }


def _run_data(run: Run) -> dict[str, Any]:
    record, name = run.record, run.record.monitor
    test = name.replace("val/", "test/")
    best = record.metrics.get(test, record.summary.get("best", {}).get(name))
    return {
        "run_id": run.run_id,
        "label": run.title,
        "headline": metric(best, name) if best is not None else run.status,
        "command": record.command or "",
        "note": run.body,
        "curves": {name: _points(curve) for name, curve in run.metrics.items()},
        "hardware": {kind: _points(curve) for kind in DEVICES if (curve := _device_mean(run, kind))},
        "confusion": record.summary.get("confusion"),
    }


def _points(curve: curves.Curve) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in values] for values in curves.thin(curve, MAX_POINTS)]


def _device_mean(run: Run, kind: str) -> curves.Curve | None:
    device, ending = "cpu" if kind == "cpu" else "gpu", DEVICES[kind][2]
    chosen = (
        c for name, c in run.samples.items() if name.partition("/")[2].startswith(device) and name.endswith(ending)
    )
    return curves.mean(chosen)


def _panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Known curves first, then whatever else was logged and changes, then the hardware."""
    changing = {name for run in runs for name, (_, values) in run.metrics.items() if len(set(values)) > 1}
    others = sorted(changing - PANELS.keys() - {"epoch", "time_s"})
    logged = [name for name in PANELS if any(name in run.metrics for run in runs)] + others[:MAX_PANELS]
    panels = [(name, *PANELS.get(name, (name, "")), False) for name in logged]
    panels += [
        (kind, title, unit, True)
        for kind, (title, unit, _) in DEVICES.items()
        if any(_device_mean(r, kind) for r in runs)
    ]
    return [
        {"key": name, "title": title, "unit": unit, "loss": "loss" in name, "smooth": name not in ("lr", "memory"),
         "hardware": is_device}
        for name, title, unit, is_device in panels
    ]  # fmt: skip


def _hardware_rows(run: Run) -> list[list[str]]:
    nodes = run.record.hardware.get("nodes") or []
    return [
        [run.title, str(node.get("node_rank")), name, number(stats.get("p50")), number(stats.get("max"))]
        for node in nodes
        for name, stats in list((node.get("stats") or {}).items())[:64]
    ]
