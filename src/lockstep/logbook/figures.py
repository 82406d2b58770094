"""The curves of one run, or of several runs side by side, as an SVG picture with the same bytes each time."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lockstep.logbook import curves
from lockstep.logbook.folders import Run

GREY = "#7d8590"  # readable on white and on black
COLOURS = ("#3b82d6", "#e0812b", "#2f9e57", "#d6455d", "#9467bd", "#a0785a", "#d267ae", "#7d8590")
MAX_POINTS = 120
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.size": 9, "axes.edgecolor": GREY, "text.color": GREY,
    "axes.labelcolor": GREY, "axes.titlecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "grid.color": GREY,
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"], "axes.spines.top": False, "axes.spines.right": False,
    "grid.alpha": 0.25, "axes.grid": True, "legend.frameon": False, "axes.titlesize": 10,
}  # fmt: skip

Line = tuple[str, curves.Curve]  # a label and what it names
Panel = tuple[str, str, list[Line]]  # title, label of the horizontal axis, lines


def run_panels(run: Run) -> list[Panel]:
    """Loss, monitored metric, learning rate and use of the devices; panels without a line are left out."""
    names = run.metrics
    monitored = dict.fromkeys((run.record.monitor, "val/acc", "train/acc"))
    loss: list[Line] = [(name, names[name]) for name in ("train/loss", "val/loss") if name in names]
    score: list[Line] = [(name, names[name]) for name in monitored if name in names and "loss" not in name]
    rate: list[Line] = [(name, names[name]) for name in names if name == "lr" or name.startswith("lr-")]
    panels: list[Panel] = [("Loss", "step", loss), ("Validation", "step", score), ("Learning rate", "step", rate)]
    return [panel for panel in [*panels, ("Utilisation in %", "seconds", use_of_devices(run))] if panel[2]]


def use_of_devices(run: Run) -> list[Line]:
    """The mean utilisation of all GPUs and of all CPUs."""
    endings = {"GPU": "utilisation_percent", "CPU": "/cpu/percent"}
    found = {
        device: curves.mean(curve for name, curve in run.samples.items() if name.endswith(ending))
        for device, ending in endings.items()
    }
    return [(device, curve) for device, curve in found.items() if curve is not None]


def compare_panels(runs: Sequence[Run], labels: Sequence[str]) -> list[Panel]:
    """The training loss and the monitored metric of each run over its epochs, and the metric over its time."""
    loss: list[Line] = []
    score: list[Line] = []
    over_time: list[Line] = []
    for run, label in zip(runs, labels, strict=True):
        per_step = (run.record.epochs or 0) / run.record.steps if run.record.steps else 0
        for lines, name in ((loss, "train/loss"), (score, run.record.monitor)):
            if name in run.metrics and per_step:
                steps, values = run.metrics[name]
                lines.append((label, (steps * per_step, values)))
        if run.record.monitor in run.metrics and "time_s" in run.metrics:
            steps, values = run.metrics[run.record.monitor]
            over_time.append((label, (_seconds_at(run, steps) / 60, values)))
    name = runs[0].record.monitor
    panels: list[Panel] = [
        ("Training loss", "epoch", loss),
        (name, "epoch", score),
        (name, "minutes of training", over_time),
    ]
    return [panel for panel in panels if panel[2]]


def _seconds_at(run: Run, steps: curves.Array) -> curves.Array:
    import numpy as np

    return np.interp(steps, *run.metrics["time_s"])


def write_figure(path: Path, panels: Iterable[Panel]) -> bool:
    """Write the panels that have a line of two points or more; return whether there is any."""
    shown = [(*panel[:2], [line for line in panel[2] if len(line[1][0]) > 1]) for panel in panels]
    shown = [panel for panel in shown if panel[2]]
    if not shown:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    columns = 3 if len(shown) == 3 else min(2, len(shown))
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 2.9 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for ax, (title, along, lines) in zip(axes, shown, strict=False):
            for number, (label, curve) in enumerate(lines):
                x, y = curves.thin(curve, MAX_POINTS)
                style = "-" if number < len(COLOURS) else "--"
                ax.plot(x, y, style, color=COLOURS[number % len(COLOURS)], label=label, linewidth=1.4)
            ax.set_title(title, loc="left")
            ax.set_xlabel(along)
            if title.startswith("Utilisation"):
                ax.set_ylim(0, 105)
            if title != "Learning rate":
                ax.legend(fontsize=8)
        for ax in axes:
            ax.set_axis_off()
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return True
