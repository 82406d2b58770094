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
    "train/loss": ("Training loss", ""), "val/loss": ("Validation loss", ""),
    "val/acc": ("Validation accuracy", "share"), "val/acc_top5": ("Validation accuracy, top 5", "share"),
    "train/acc": ("Training accuracy", "share"), "lr": ("Learning rate", ""),
    "images_per_s": ("Images per second", ""),
}  # fmt: skip
DEVICES = {  # title, unit, and what the names of its samples begin and end with
    "gpu": ("GPU utilisation, mean of all devices", "percent", "gpu", "utilisation_percent"),
    "memory": ("GPU memory in GiB, mean of all devices", "", "gpu", "memory_gib"),
    "cpu": ("CPU utilisation", "percent", "cpu", "cpu/percent"),
}


def report_html(title: str, runs: Sequence[Run]) -> str:
    """Return the whole file; the same runs give the same bytes."""
    data = json.dumps(redact(report_data(runs)), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    for mark in "<>&@":  # no text of a run may end the script element, or be taken for a part
        data = data.replace(mark, f"\\u{ord(mark):04x}")
    read = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    parts = {
        "@TITLE@": html.escape(title).replace("@", "&#64;"), "@STYLE@": read["uPlot.min.css"] + read["report.css"],
        "@UPLOT@": read["uPlot.iife.min.js"], "@SCRIPT@": read["report.js"], "@DATA@": data,
    }  # fmt: skip
    page = read["report.html"]
    for mark, text in parts.items():
        page = page.replace(mark, text)
    return page


def report_data(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what report.js draws."""
    labels, caution = [run.title for run in runs], not_held_fixed(runs)
    numbers = [("Run", [run.run_id for run in runs]), *number_rows(runs)]
    tables = {"numbers": ("", numbers), "settings": ("option", setting_rows(runs))}
    return {
        "subtitle": f"{len(runs)} run{'s' if len(runs) != 1 else ''}",
        "cautions": [caution] if caution else [],
        "runs": [_run_data(run) for run in runs],
        "panels": _panels(runs),
        **{
            name: {"head": [head, *labels], "rows": [[row, *cells] for row, cells in rows], "none": "none"}
            for name, (head, rows) in tables.items()
        },
        "hardware": {
            "head": ["run", "node", "measured", "median", "maximum"],
            "rows": [row for run in runs for row in _hardware_rows(run)],
        },
    }


def _run_data(run: Run) -> dict[str, Any]:
    record, name = run.record, run.record.monitor
    best = record.metrics.get(name.replace("val/", "test/"), record.summary.get("best", {}).get(name))
    return {
        "run_id": run.run_id,
        "label": run.title,
        "headline": metric(best, name) if best is not None else run.status,
        "command": record.command or "",
        "note": run.note,
        "curves": {name: _points(curve) for name, curve in run.metrics.items()},
        "hardware": {kind: _points(curve) for kind in DEVICES if (curve := _device_mean(run, kind))},
        "confusion": record.summary.get("confusion"),
    }


def _points(curve: curves.Curve) -> list[list[float]]:
    return [[float(f"{value:.6g}") for value in values] for values in curves.thin(curve, MAX_POINTS)]


def _device_mean(run: Run, kind: str) -> curves.Curve | None:
    _, _, begin, end = DEVICES[kind]
    named = ((name.partition("/")[2], curve) for name, curve in run.samples.items())
    return curves.mean(curve for name, curve in named if name.startswith(begin) and name.endswith(end))


def _panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Known curves first, then whatever else was logged and changes, then the hardware."""
    changing = {name for run in runs for name, (_, values) in run.metrics.items() if len(set(values)) > 1}
    others = sorted(changing - PANELS.keys() - {"epoch", "time_s", "val/correct", "val/images"})[:MAX_PANELS]
    logged = [name for name in PANELS if any(name in run.metrics for run in runs)] + others
    devices = [kind for kind in DEVICES if any(_device_mean(run, kind) for run in runs)]
    panels = [(name, *PANELS.get(name, (name, ""))) for name in logged] + [
        (kind, *DEVICES[kind][:2]) for kind in devices
    ]
    return [
        {"key": name, "title": title, "unit": unit, "loss": "loss" in name, "smooth": name not in ("lr", "memory"),
         "hardware": name in devices}
        for name, title, unit in panels
    ]  # fmt: skip


def _hardware_rows(run: Run) -> list[list[str]]:
    return [
        [run.title, str(node.get("node_rank")), name, number(stats.get("p50")), number(stats.get("max"))]
        for node in run.record.hardware.get("nodes") or []
        for name, stats in list((node.get("stats") or {}).items())[:64]
    ]
