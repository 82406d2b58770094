"""Draw SVG pictures: the curves of one run or of several runs, and the arms of a sweep.

The same runs give a picture with the same bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.logbook.arms import Arm, Arms
from lockstep.logbook.folders import NO_METRIC, Curve, RecordedRun, labels_of
from lockstep.logbook.render import is_share
from lockstep.records.metric_names import split_stage

STYLE = Path(__file__).parent / "static" / "figures.mplstyle"
MAX_POINTS = 120  # of a line
# The most lines in the panel of metrics that belong into no other panel.
MAX_OTHERS = 6
ROW_HEIGHT = 2.9  # inches
WIDTH = 10.0  # inches
EPOCH = "epoch"
MINUTES = "minutes of training"
# The figure of a sweep.
MAX_ARMS = 20
LONGEST_NAME = 48  # characters
KEY_HEIGHT = 3.0  # inches
ARM_HEIGHT = 0.4  # inches
AXIS_HEIGHT = 1.0  # inches
# If the largest value of a key is at least so many times the smallest one, its axis is logarithmic.
LOGARITHMIC = 20
# A legend below the panels.
CHARACTERS_A_LINE = 130
CHARACTERS_OF_HANDLE = 8
LEGEND_LINE = 0.2  # inches


class Panel(NamedTuple):
    """One coordinate system of a picture.

    Attributes:
        x_label: label of the horizontal axis.
        lines: curves by their labels.
        metric: its name in metrics.csv, if all lines show the same metric.
    """

    title: str
    x_label: str
    lines: dict[str, Curve]
    metric: str = ""


def run_panels(run: RecordedRun) -> list[Panel]:
    """Return the panels of loss, monitored metric, learning rate and use of the devices.

    If a run has neither a loss nor a monitored metric, a panel of some other metrics comes first.
    """
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
    if not panels[0].lines and not panels[1].lines:
        others = [name for name in run.metrics if not NO_METRIC.match(name)]
        lines = {name: run.metrics[name] for name in others[:MAX_OTHERS]}
        panels.insert(0, Panel("Metrics", "step", lines))
    return panels


def why_no_curves(run: RecordedRun) -> str:
    """Return the sentence that a page shows in place of curves."""
    if not run.metrics:
        return "No curves: there is no metrics.csv, or it is empty."
    return "No curves: no metric in metrics.csv has two points."


def _is_loss(name: str) -> bool:
    return name.endswith("loss") and split_stage(name)[0] != "test"


def _is_learning_rate(name: str) -> bool:
    return name == "lr" or name.startswith("lr-")


def compare_panels(runs: Sequence[RecordedRun]) -> list[Panel]:
    """Return the panels of the training loss and of the monitored metrics of all runs.

    The horizontal axis has epochs. Monitored metrics have a second panel over time.
    """
    panels = [Panel("Training loss", EPOCH, {}, "train/loss")]
    for monitor in dict.fromkeys(run.record.monitor for run in runs):
        panels.append(Panel(monitor, EPOCH, {}, monitor))
        panels.append(Panel(monitor, MINUTES, {}, monitor))

    for label, run in zip(labels_of(runs), runs, strict=True):
        for panel in panels:
            curve = _curve_of_panel(run, panel)
            if curve is not None:
                panel.lines[label] = curve
    return panels


def _curve_of_panel(run: RecordedRun, panel: Panel) -> Curve | None:
    """Return the curve of a run along the axis of a panel; None if the run lacks a column."""
    if panel.metric not in run.metrics:
        return None
    steps, values = run.metrics[panel.metric]
    if panel.x_label == EPOCH:
        return steps / _steps_per_epoch(run), values
    if "time_s" not in run.metrics:
        return None
    return np.interp(steps, *run.metrics["time_s"]) / 60, values


def _steps_per_epoch(run: RecordedRun) -> float:
    """Return the optimizer steps of a whole epoch, also of a run that ended within one.

    The record counts an epoch that was left early as one.
    """
    record = run.record
    steps, epochs = run.metrics.get("epoch", (np.zeros(0), np.zeros(0)))
    is_whole = epochs < epochs.max(initial=0)
    if not is_whole.any():
        # The only epoch may have been left early.
        whole = (record.num_train or 0) // (record.global_batch_size or 1)
        if str(run.config.get("trainer.limit_train_batches", 1.0)) != "1.0":
            whole = 0
        return float(max(whole, steps.max(initial=1), record.steps or 0))
    # Epoch e, from 0, has begun at the latest with its first row, and ended at the earliest with
    # its last one.
    least = (steps[is_whole] / (epochs[is_whole] + 1)).max()
    most = (steps[epochs > 0] / epochs[epochs > 0]).min()
    recorded = (record.steps or 0) / (record.epochs or 1)
    return float(recorded if least <= recorded < most else least)


def missing_curves(runs: Sequence[RecordedRun], panels: Sequence[Panel]) -> list[str]:
    """Return a sentence for each curve of a comparison that some of its runs lack."""
    labels = labels_of(runs)
    without = [label for label, run in zip(labels, runs, strict=True) if not run.metrics]
    sentences = []
    if without:
        sentences.append(f"No curves of {', '.join(without)}: there is no metrics.csv.")
    elif not panels_with_lines(panels):
        sentences.append("No curves: no metric in metrics.csv has two points.")
    for panel in panels:
        absent = [label for label in labels if label not in panel.lines and label not in without]
        if absent:
            name = panel.metric if panel.x_label == EPOCH else f"{panel.metric} over {MINUTES}"
            sentences.append(f"metrics.csv of {', '.join(absent)} has no {name}.")
    return sentences


def thin_curve(curve: Curve, limit: int) -> Curve:
    """Return at most `limit` evenly spaced points of a curve, including its last point."""
    steps, values = curve
    count = min(len(steps), limit)
    chosen = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return steps[chosen], values[chosen]


def panels_with_lines(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels in which a curve has two points or more, so that it shows a line."""
    return [panel for panel in panels if _longest_line(panel) > 1]


def _longest_line(panel: Panel) -> int:
    """Return the number of points of the longest curve."""
    return max((len(steps) for steps, _ in panel.lines.values()), default=0)


def write_figure(path: Path, panels: Sequence[Panel], *, has_one_legend: bool = False) -> bool:
    """Write the picture, or remove it if there is nothing to draw.

    Args:
        has_one_legend: a label has the same colour in all panels, and one legend is below them.
    """
    path.unlink(missing_ok=True)
    shown = panels_with_lines(panels)
    if not shown:
        return False

    import matplotlib
    from matplotlib.figure import Figure

    columns = 3 if len(shown) == 3 else min(2, len(shown))
    rows = math.ceil(len(shown) / columns)
    labels = list(dict.fromkeys(chain.from_iterable(panel.lines for panel in shown)))
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH, ROW_HEIGHT * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for ax, panel in zip(axes, shown, strict=False):
            _draw_panel(ax, panel, labels if has_one_legend else list(panel.lines))
            if not has_one_legend and panel.title != "Learning rate":
                ax.legend()
        if has_one_legend:
            _add_legend(figure, axes, labels)
        for ax in axes[len(shown) :]:
            ax.set_axis_off()
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return True


def _draw_panel(ax: Any, panel: Panel, labels: list[str]) -> None:
    """Draw the curves of a panel. The position of a label among all labels gives its colour."""
    for label, curve in panel.lines.items():
        # A single point makes no line, so it is drawn as a dot.
        marker = "." if len(curve[0]) == 1 else None
        colour = f"C{labels.index(label)}"
        ax.plot(*thin_curve(curve, MAX_POINTS), color=colour, label=label, marker=marker)
    ax.set(title=panel.title, xlabel=panel.x_label)
    if panel.title.startswith("Utilisation"):
        ax.set_ylim(0, 105)


def _add_legend(figure: Any, axes: Sequence[Any], labels: list[str]) -> None:
    """Make the figure taller, and add one legend below the panels."""
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


def write_sweep_figure(
    path: Path, arms: Arms, numeric_keys: Mapping[str, Mapping[str, float]]
) -> bool:
    """Write the figure, or remove it if there is nothing to draw.

    Args:
        numeric_keys: the numbers of the keys by run, as {"optimizer.lr": {run_id: 0.1}}.
    """
    path.unlink(missing_ok=True)
    if sum(len(arm.runs) for arm in arms.ranked) < 2:
        return False
    # Each row of the figure has its height and the function that draws it.
    rows: list[tuple[float, Callable[[Any], None]]] = []
    if len(arms.ranked) <= MAX_ARMS and (arms.has_repeats or not numeric_keys):
        height = AXIS_HEIGHT + ARM_HEIGHT * len(arms.ranked)
        rows.append((height, partial(_draw_arms, arms=arms)))
    if numeric_keys:
        rows.append((KEY_HEIGHT, partial(_draw_keys, arms=arms, numeric_keys=numeric_keys)))
    if not rows:
        return False

    import matplotlib
    from matplotlib.figure import Figure

    heights = [height for height, _ in rows]
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        subfigures = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
        for subfigure, (_, draw) in zip(subfigures.flat, rows, strict=True):
            draw(subfigure)
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return True


def _scale_of(arms: Arms) -> int:
    return 100 if is_share(arms.metric) else 1


def _axis_label(arms: Arms) -> str:
    return f"{arms.metric} in %" if is_share(arms.metric) else arms.metric


def _draw_arms(subfigure: Any, arms: Arms) -> None:
    """Draw a row for each arm, the best one on top."""
    ax = subfigure.subplots()
    names = []
    for row, arm in enumerate(arms.ranked):
        scale = _scale_of(arms)
        values = [scale * run.value for run in arm.runs]
        ax.plot(values, [row] * len(values), "o", color="C0", alpha=0.5, markersize=4)
        width = scale * arm.values.half_width
        if len(values) > 1:
            ax.plot(scale * arm.values.mean, row, "|", color="C1", markersize=14, markeredgewidth=2)
        if math.isfinite(width):
            ax.errorbar(scale * arm.values.mean, row, xerr=width, color="C1", capsize=3)
        names.append(_arm_name(arm))
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(xlabel=_axis_label(arms))


def _arm_name(arm: Arm) -> str:
    if len(arm.name) > LONGEST_NAME:
        return f"{arm.name[: LONGEST_NAME - 1]}…"
    return arm.name or f"{len(arm.runs)} runs"


def _draw_keys(subfigure: Any, arms: Arms, numeric_keys: Mapping[str, Mapping[str, float]]) -> None:
    axes = subfigure.subplots(1, len(numeric_keys), squeeze=False)
    for ax, (key, numbers) in zip(axes.flat, numeric_keys.items(), strict=True):
        _draw_key(ax, arms, key, numbers)


def _draw_key(ax: Any, arms: Arms, key: str, numbers: Mapping[str, float]) -> None:
    """Draw the metric of each run against its number, and the mean of each number."""
    values_at: dict[float, list[float]] = {}
    for arm in arms.ranked:
        for run in arm.runs:
            values_at.setdefault(numbers[run.run_id], []).append(_scale_of(arms) * run.value)
    for number, values in values_at.items():
        ax.plot([number] * len(values), values, "o", color="C0", alpha=0.5, markersize=4)
    sorted_numbers = sorted(values_at)
    means = [sum(values_at[number]) / len(values_at[number]) for number in sorted_numbers]
    ax.plot(sorted_numbers, means, color="C1")
    if min(sorted_numbers) > 0 and max(sorted_numbers) / min(sorted_numbers) >= LOGARITHMIC:
        ax.set_xscale("log")
    ax.set(xlabel=key, ylabel=_axis_label(arms))
