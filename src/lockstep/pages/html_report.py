"""One self-contained HTML file with interactive curves of chosen runs: opens from disk, from S3, on a phone.

The parts lie beside this file: report.html, report.css, report.js, and uPlot (MIT, uPlot.LICENSE).
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.pages import formats as f
from lockstep.pages.comparison_page import differing_settings
from lockstep.pages.curves import mean_over_time
from lockstep.pages.entry import Entry
from lockstep.pages.facts import RunFacts
from lockstep.pages.fairness import cautions
from lockstep.pages.index_page import checkpoint_place, status_cell
from lockstep.pages.markdown import clean, one_line
from lockstep.pages.measured import measured_values, of_tested

PARTS = Path(__file__).parent / "static"
KNOWN_PANELS = {
    "train/loss": ("Training loss", "", True),
    "val/loss": ("Validation loss", "", True),
    "val/acc": ("Validation accuracy", "share", False),
    "val/acc_top5": ("Validation accuracy, top 5", "share", False),
    "train/acc": ("Training accuracy", "share", False),
    "lr": ("Learning rate", "", False),
    "images_per_s": ("Images per second", "", False),
}
NO_PANEL = ("step", "epoch", "time_s")
MAX_PANELS = 24

Data = dict[str, Any]  # what the report's script reads, as JSON


def report_html(title: str, entries: Sequence[Entry], labels: Sequence[str]) -> str:
    """The whole file; the same runs give the same bytes."""
    parts = {
        "@TITLE@": html.escape(one_line(title, 120)).replace("@", "&#64;"),
        "@STYLE@": part("uPlot.min.css") + part("report.css"),
        "@UPLOT@": part("uPlot.iife.min.js"),
        "@SCRIPT@": part("report.js"),
        "@DATA@": script_json(report_data(entries, labels)),
    }
    pieces = part("report.html")
    for mark, text in parts.items():  # the data comes last, so that no text of a run is taken for a mark
        pieces = pieces.replace(mark, text)
    return pieces


def part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026").replace("@", "\\u0040")


def report_data(entries: Sequence[Entry], labels: Sequence[str]) -> Data:
    labels = [one_line(label, 80) for label in labels]
    return {
        "subtitle": f"{len(entries)} run{'s' if len(entries) != 1 else ''}",
        "cautions": cautions(entries, labels),
        "runs": [run_data(entry, label) for entry, label in zip(entries, labels, strict=True)],
        "panels": panels([entry.facts for entry in entries]),
        "numbers": {"head": ["", *labels], "rows": number_rows(entries)},
        "settings": {"head": ["key", *labels], "rows": setting_rows(entries), "none": "none: the same settings"},
        "hardware": {
            "head": ["run", "node", "measured", "p10", "p50", "p90", "max"],
            "rows": hardware(entries, labels),
        },
    }


def run_data(entry: Entry, label: str) -> Data:
    run = entry.facts
    names = run.source.get("curves") if isinstance(run.source.get("curves"), dict) else {}
    accuracy = run.test_acc if run.test_acc is not None else run.best_val_acc
    part = of_tested(run) if run.test_acc is not None else ""
    return {
        "run_id": run.run_id,
        "label": label,
        "headline": f.percent(accuracy) + part if accuracy is not None else run.status,
        "command": clean(run.commands),
        "note": clean(entry.note.text),
        "curves": {name: pair for name in names if (pair := run.curve(name))[0]},
        "hardware": hardware_means(run),
        "confusion": {"names": run.confusion[0], "counts": run.confusion[1]} if run.confusion else None,
    }


def hardware_means(run: RunFacts) -> dict[str, tuple[list[float], list[float]]]:
    """Mean over all devices at the same moments: GPU and CPU utilisation, GPU memory."""
    kinds = {"gpu": "utilisation_percent", "memory": "memory_gib", "cpu": "cpu/percent"}
    means = {}
    for kind, ending in kinds.items():
        found = [
            pair
            for _, name, pair in run.hardware_series()
            if pair[0] and name.endswith(ending) and (kind == "cpu") == name.startswith("cpu")
            and not (kind == "memory" and not name.startswith("gpu"))
        ]  # fmt: skip
        if found:
            x, values = mean_over_time(found)
            means[kind] = (x, [round(value, 3) for value in values])
    return means


def panels(runs: Sequence[RunFacts]) -> list[Data]:
    """Known curves first, then whatever else was logged and is not one number all along, then the hardware."""
    logged = {name for run in runs for name in (run.source.get("curves") or {}) if run.curve(name)[0]}
    changing = {name for name in logged if any(len(set(run.curve(name)[1])) > 1 for run in runs)}
    others = sorted(changing - set(KNOWN_PANELS) - set(NO_PANEL))
    chosen = [name for name in KNOWN_PANELS if name in logged] + others[:MAX_PANELS]
    found = []
    for name in chosen:
        title, unit, is_loss = KNOWN_PANELS.get(name, (one_line(name, 60), "", "loss" in name))
        found.append(
            {"key": name, "title": title, "unit": unit, "loss": is_loss, "smooth": name != "lr", "hardware": False}
        )
    held = {kind for run in runs for kind in hardware_means(run)}
    titles = {"gpu": ("GPU utilisation, mean of all devices", "percent"),
              "memory": ("GPU memory in GiB, mean of all devices", ""),
              "cpu": ("CPU utilisation", "percent")}  # fmt: skip
    return found + [
        {"key": kind, "title": title, "unit": unit, "loss": False, "smooth": kind != "memory", "hardware": True}
        for kind, (title, unit) in titles.items()
        if kind in held
    ]


def number_rows(entries: Sequence[Entry]) -> list[list[str]]:
    runs = [entry.facts for entry in entries]
    rows = [
        ["Run", *(run.run_id for run in runs)],
        ["Started (UTC)", *(one_line(run.date) for run in runs)],
        ["Status", *(status_cell(entry) for entry in entries)],
        ["Experiment", *(one_line(run.experiment, 80) for run in runs)],
        ["Model", *(one_line(run.record.model, 80) for run in runs)],
        ["Data", *(one_line(run.record.data, 80) for run in runs)],
        ["Strategy", *(one_line(run.strategy, 80) for run in runs)],
        ["World", *(one_line(run.world, 80) for run in runs)],
        *([name, *cells] for name, cells in measured_values(entries)),
        ["Best checkpoint", *(one_line(checkpoint_place(entry), 200) for entry in entries)],
        ["sha256", *(one_line(run.record.best_checkpoint.sha256, 80) for run in runs)],
    ]
    return [row for row in rows if any(cell and cell != f.NONE for cell in row[1:])]


def setting_rows(entries: Sequence[Entry]) -> list[list[str]]:
    return [
        [one_line(key, 100), *(one_line(value, 120) for value in values)] for key, values in differing_settings(entries)
    ]


def hardware(entries: Sequence[Entry], labels: Sequence[str]) -> list[list[str]]:
    return [
        [
            label,
            one_line(rank, 20),
            one_line(name, 60),
            *(f.rate(stats.get(key)) for key in ("p10", "p50", "p90", "max")),
        ]
        for entry, label in zip(entries, labels, strict=True)
        for rank, name, stats in entry.facts.device_stats[:64]
    ]
