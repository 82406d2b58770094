"""Which pictures a page has: the curves of one run, its confusion matrix, and several runs in one picture."""

from collections.abc import Sequence

from pages.confusion_svg import confusion_svg
from pages.facts import RunFacts
from pages.svg import LIGHT, Panel, Series, figure

MAX_COMPARED = len(LIGHT)


def run_figure(run: RunFacts) -> str:
    """Loss, accuracy, learning rate and utilisation of one run; an empty string where nothing was logged."""
    panels = run_panels(run)
    return figure(f"Curves of {run.run_id}", panels) if any(panel.series for panel in panels) else ""


def has_curves(run: RunFacts) -> bool:
    return any(panel.series for panel in run_panels(run))


def run_panels(run: RunFacts) -> list[Panel]:
    return [
        metric_panel("Loss", run, {"train/loss": "training", "val/loss": "validation"}),
        metric_panel("Accuracy", run, {"val/acc": "validation", "val/acc_top5": "validation, top 5"}, "%"),
        metric_panel("Learning rate", run, {"lr": "learning rate"}),
        utilisation_panel(run),
    ]


def metric_panel(title: str, run: RunFacts, names: dict[str, str], unit: str = "") -> Panel:
    series = []
    for color, (name, label) in enumerate(names.items()):
        x, y = run.curve(name)
        if x:
            series.append(Series(label, x, y, color))
    return Panel(title, series, unit or scale_of(series))


def scale_of(series: Sequence[Series]) -> str:
    """Logarithmic where a loss falls over more than a factor of fifty."""
    values = [value for one in series for value in one.y]
    return "log" if values and min(values) > 0 and max(values) / min(values) > 50 else ""


def utilisation_panel(run: RunFacts) -> Panel:
    """Every GPU's share of busy time, or the CPU's where there is none."""
    found = [(rank, name, pair) for rank, name, pair in run.hardware_series() if pair[0]]
    chosen = [entry for entry in found if entry[1].endswith("utilisation_percent")]
    chosen = chosen or [entry for entry in found if entry[1] == "cpu/percent"]
    several_nodes = len({rank for rank, _, _ in chosen}) > 1
    title = "GPU utilisation over time" if chosen and chosen[0][1] != "cpu/percent" else "CPU utilisation over time"
    longest = max((pair[0][-1] for _, _, pair in chosen), default=0.0)
    unit, divisor = ("h", 3600) if longest > 7200 else ("min", 60) if longest > 180 else ("s", 1)
    series = []
    for color, (rank, name, (x, y)) in enumerate(chosen[:MAX_COMPARED]):
        device = name.split("/")[0].replace("gpu", "GPU ").replace("cpu", "CPU")
        label = f"node {rank} {device}" if several_nodes else device
        series.append(Series(label, [value / divisor for value in x], y, color))
    return Panel(title, series, "100", unit)


def confusion_figure(run: RunFacts) -> str:
    """An empty string where the run has no test counts."""
    if run.confusion is None:
        return ""
    names, counts = run.confusion
    right = sum(counts[i][i] for i in range(len(counts)))
    total = sum(map(sum, counts))
    return confusion_svg(f"Test set: {right:,} of {total:,} right", names, counts)


def comparison_figure(runs: Sequence[RunFacts], labels: Sequence[str]) -> str:
    """Training loss, validation accuracy and loss, and accuracy over time, one colour a run."""
    shown = list(zip(runs, labels, strict=True))[:MAX_COMPARED]
    train, val = compared(shown, "train/loss"), compared(shown, "val/loss")
    panels = [
        Panel("Training loss", train, scale_of(train)),
        Panel("Validation accuracy", compared(shown, "val/acc"), "%"),
        Panel("Validation loss", val, scale_of(val)),
        over_time_panel(shown),
    ]
    return figure("Curves side by side", panels) if any(panel.series for panel in panels) else ""


def compared(shown: Sequence[tuple[RunFacts, str]], name: str) -> list[Series]:
    curves = [(label, run.curve(name), color) for color, (run, label) in enumerate(shown)]
    return [Series(label, x, y, color, dashed=color % 2 == 1) for label, (x, y), color in curves if x]


def over_time_panel(shown: Sequence[tuple[RunFacts, str]]) -> Panel:
    """The same accuracy over the seconds of training: what a faster strategy is worth."""
    timed = [(label, seconds_at(run, run.curve("val/acc")), color) for color, (run, label) in enumerate(shown)]
    longest = max((x[-1] for _, (x, _), _ in timed if x), default=0.0)
    unit, divisor = ("h", 3600) if longest > 7200 else ("min", 60) if longest > 180 else ("s", 1)
    series = [
        Series(label, [value / divisor for value in x], y, color, dashed=color % 2 == 1)
        for label, (x, y), color in timed
        if x
    ]
    return Panel("Validation accuracy over time", series, "%", unit)


def seconds_at(run: RunFacts, curve: tuple[list[float], list[float]]) -> tuple[list[float], list[float]]:
    """The curve over seconds since the start, read off the `time_s` column; empty where it is missing."""
    steps, times = run.curve("time_s")
    if not steps or not curve[0]:
        return [], []
    return [interpolated(x, steps, times) for x in curve[0]], curve[1]


def interpolated(x: float, known: Sequence[float], values: Sequence[float]) -> float:
    """Linear between the known places, flat outside."""
    if x <= known[0]:
        return values[0]
    for i in range(1, len(known)):
        if x <= known[i]:
            share = (x - known[i - 1]) / ((known[i] - known[i - 1]) or 1)
            return values[i - 1] + share * (values[i] - values[i - 1])
    return values[-1]
