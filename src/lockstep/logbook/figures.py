"""The curves of one run, or of several runs side by side, as an SVG picture with the same bytes each time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lockstep.logbook.folders import Curve, Run

STYLE = Path(__file__).parent / "static" / "figures.mplstyle"
MAX_POINTS, MIN_POINTS = 120, 5

Panel = tuple[str, str, dict[str, Curve]]  # title, label of the horizontal axis, lines by their labels


def run_panels(run: Run) -> list[Panel]:
    """Loss, monitored metric, learning rate and use of the devices."""
    scores = [name for name in dict.fromkeys((run.record.monitor, "val/acc", "train/acc")) if "loss" not in name]
    rates = [name for name in run.metrics if name == "lr" or name.startswith("lr-")]
    named = {
        "Loss": ["train/loss", "val/loss", "val_loss"], "Validation": scores, "Learning rate": rates,
        "Utilisation in %": ["hardware/gpu_percent", "hardware/cpu_percent"],
    }  # fmt: skip
    return [
        (title, "step", {name: run.metrics[name] for name in names if name in run.metrics})
        for title, names in named.items()
    ]


def compare_panels(runs: Sequence[Run]) -> list[Panel]:
    """The training loss and the monitored metric of each run over its epochs, and the metric over its time."""
    name = runs[0].record.monitor
    panels: list[Panel] = [("Training loss", "epoch", {}), (name, "epoch", {}), (name, "minutes of training", {})]
    for run in runs:
        epochs_per_step = (run.record.epochs or 0) / (run.record.steps or 1)
        for (_, _, lines), metric in zip(panels, ("train/loss", name), strict=False):
            if metric in run.metrics:
                steps, values = run.metrics[metric]
                lines[run.title] = (steps * epochs_per_step, values)
        if name in run.metrics and "time_s" in run.metrics:
            steps, values = run.metrics[name]
            panels[2][2][run.title] = (np.interp(steps, *run.metrics["time_s"]) / 60, values)
    return panels


def thin(curve: Curve, limit: int) -> Curve:
    """Return at most `limit` evenly chosen points of a curve, the last one among them."""
    chosen = np.linspace(0, len(curve[0]) - 1, min(len(curve[0]), limit)).round().astype(int)
    return curve[0][chosen], curve[1][chosen]


def drawn(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels that have a line; none if no line has at least MIN_POINTS."""
    shown = [panel for panel in panels if any(len(steps) > 1 for steps, _ in panel[2].values())]
    return shown if any(len(steps) >= MIN_POINTS for _, _, lines in shown for steps, _ in lines.values()) else []


def write_figure(path: Path, panels: Sequence[Panel]) -> bool:
    """Write the picture; remove it if there is nothing to draw."""
    path.unlink(missing_ok=True)
    shown = drawn(panels)
    if not shown:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    columns = 3 if len(shown) == 3 else min(2, len(shown))
    rows = -(-len(shown) // columns)
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(10, 2.9 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flat
        for ax, (title, along, lines) in zip(axes, shown, strict=False):
            for label, curve in lines.items():
                ax.plot(*thin(curve, MAX_POINTS), label=label)
            ax.set(title=title, xlabel=along, **({"ylim": (0, 105)} if title.startswith("Utilisation") else {}))
            if title != "Learning rate":
                ax.legend()
        for ax in axes:
            ax.set_axis_off()
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return True
