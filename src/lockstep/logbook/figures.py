"""The curves of one run, or of several runs side by side, as an SVG picture.

The picture has the same bytes each time.
"""

import math
from collections import ChainMap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.logbook.folders import Curve, Run
from lockstep.process.output import split_stage

STYLE = Path(__file__).parent / "static" / "figures.mplstyle"
MAX_POINTS = 120  # of a line
MIN_POINTS = 5  # of the longest line
ROW_HEIGHT = 2.9  # inches
WIDTH = 10.0  # inches
# A legend below the panels.
CHARACTERS_A_LINE = 130
CHARACTERS_OF_HANDLE = 8
LEGEND_LINE = 0.2  # inches


class Panel(NamedTuple):
    """One coordinate system of a picture.

    Attributes:
        along: label of the horizontal axis.
        lines: curves by their labels.
    """

    title: str
    along: str
    lines: dict[str, Curve]


def run_panels(run: Run) -> list[Panel]:
    """Return loss, monitored metric, learning rate and use of the devices."""
    accuracies = dict.fromkeys((run.record.monitor, "val/acc", "train/acc"))
    losses = dict.fromkeys(("train/loss", "val/loss", *filter(_is_loss, run.metrics)))
    names_of_panel = {
        "Loss": list(losses),
        "Validation": [name for name in accuracies if "loss" not in name],
        "Learning rate": [name for name in run.metrics if _is_learning_rate(name)],
        "Utilisation in %": ["hardware/gpu_percent", "hardware/cpu_percent"],
    }
    panels = []
    for title, names in names_of_panel.items():
        lines = {name: run.metrics[name] for name in names if name in run.metrics}
        panels.append(Panel(title, "step", lines))
    return panels


def _is_loss(name: str) -> bool:
    return name.endswith("loss") and split_stage(name)[0] != "test"


def _is_learning_rate(name: str) -> bool:
    return name == "lr" or name.startswith("lr-")


def compare_panels(runs: Sequence[Run]) -> list[Panel]:
    """Return the training loss and the monitored metric of each run.

    They go over its epochs, and the metric over its time too.
    """
    monitor = runs[0].record.monitor
    loss = Panel("Training loss", "epoch", {})
    metric = Panel(monitor, "epoch", {})
    metric_over_time = Panel(monitor, "minutes of training", {})

    for run in runs:
        epochs_per_step = (run.record.epochs or 0) / (run.record.steps or 1)
        for panel, name in ((loss, "train/loss"), (metric, monitor)):
            if name in run.metrics:
                steps, values = run.metrics[name]
                panel.lines[run.title] = (steps * epochs_per_step, values)
        if monitor in run.metrics and "time_s" in run.metrics:
            steps, values = run.metrics[monitor]
            minutes = np.interp(steps, *run.metrics["time_s"]) / 60
            metric_over_time.lines[run.title] = (minutes, values)
    return [loss, metric, metric_over_time]


def thin(curve: Curve, limit: int) -> Curve:
    """Return at most `limit` evenly chosen points of a curve, the last one among them."""
    steps, values = curve
    count = min(len(steps), limit)
    chosen = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return steps[chosen], values[chosen]


def drawn(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels that have a line; none if no line has at least MIN_POINTS."""
    shown = [panel for panel in panels if _longest_line(panel) > 1]
    longest = max((_longest_line(panel) for panel in shown), default=0)
    if longest < MIN_POINTS:
        return []
    return shown


def _longest_line(panel: Panel) -> int:
    """Return the number of points."""
    return max((len(steps) for steps, _ in panel.lines.values()), default=0)


def write_figure(path: Path, panels: Sequence[Panel], *, has_one_legend: bool = False) -> bool:
    """Write the picture; remove it if there is nothing to draw.

    Args:
        has_one_legend: a label has one colour in all panels, and the legend stands below them.
    """
    path.unlink(missing_ok=True)
    shown = drawn(panels)
    if not shown:
        return False

    import matplotlib
    from matplotlib.figure import Figure

    columns = 3 if len(shown) == 3 else min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    labels = list(ChainMap(*(panel.lines for panel in reversed(shown))))
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH, ROW_HEIGHT * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, panel in zip(axes, shown, strict=False):
            _draw(ax, panel, labels if has_one_legend else list(panel.lines))
            if not has_one_legend and panel.title != "Learning rate":
                ax.legend()
        if has_one_legend:
            _add_legend(figure, axes, labels)
        for ax in axes[len(shown) :]:
            ax.set_axis_off()
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return True


def _draw(ax: Any, panel: Panel, labels: list[str]) -> None:
    """Draw the lines of a panel, each in the colour of its place among the labels."""
    for label, curve in panel.lines.items():
        ax.plot(*thin(curve, MAX_POINTS), color=f"C{labels.index(label)}", label=label)
    ax.set(title=panel.title, xlabel=panel.along)
    if panel.title.startswith("Utilisation"):
        ax.set_ylim(0, 105)


def _add_legend(figure: Any, axes: Sequence[Any], labels: list[str]) -> None:
    """Add one legend below the panels, on a taller figure, so that no curve lies under it."""
    line_of: dict[str, Any] = {}
    for ax in axes:
        for line in ax.get_lines():
            line_of.setdefault(line.get_label(), line)
    longest = max(map(len, labels)) + CHARACTERS_OF_HANDLE
    columns = max(1, min(len(labels), CHARACTERS_A_LINE // longest))
    height = LEGEND_LINE * (math.ceil(len(labels) / columns) + 1)
    figure.set_size_inches(WIDTH, figure.get_figheight() + height)
    lines = [line_of[label] for label in labels]
    figure.legend(lines, labels, loc="outside lower left", ncols=columns)
