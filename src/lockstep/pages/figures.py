"""Which pictures a page has: the curves of one run, its confusion matrix, and several runs in one picture."""

from collections.abc import Sequence
from pathlib import Path

from lockstep.pages.confusion_svg import confusion_svg
from lockstep.pages.curves import interpolated, mean_over_time
from lockstep.pages.facts import RunFacts
from lockstep.pages.svg import LIGHT, OLD_STYLE_BEGINS, STYLE_BEGINS, Panel, Series, figure

MAX_LINES = len(LIGHT)
MAX_COMPARED = 2 * len(LIGHT)  # each colour once as a line and once dashed


def is_ours(path: Path) -> bool:
    """A person may keep drawings beside ours."""
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(2000)
    return STYLE_BEGINS in head or OLD_STYLE_BEGINS in head


def run_figure(run: RunFacts) -> str:
    """Loss, accuracy, learning rate and utilisation of one run; an empty string where nothing was logged."""
    panels = run_panels(run)
    return figure(f"Curves of {run.run_id}", panels) if any(panel.series for panel in panels) else ""


def has_curves(run: RunFacts) -> bool:
    return any(panel.series for panel in run_panels(run))


def run_panels(run: RunFacts) -> list[Panel]:
    return [
        metric_panel("Loss", run, {"train/loss": "training", "val/loss": "validation"}),
        metric_panel(
            "Accuracy",
            run,
            {"val/acc": "validation", "val/acc_top5": "validation, top 5", "train/acc": "training"},
            "%",
        ),
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
    """Every GPU's share of busy time, or the CPU's where there is none; a mean of each node where those are many."""
    found = [(rank, name, pair) for rank, name, pair in run.hardware_series() if pair[0]]
    chosen = [entry for entry in found if entry[1].endswith("utilisation_percent")]
    chosen = chosen or [entry for entry in found if entry[1] == "cpu/percent"]
    title = "GPU utilisation over time" if chosen and chosen[0][1] != "cpu/percent" else "CPU utilisation over time"
    longest = max((pair[0][-1] for _, _, pair in chosen), default=0.0)
    unit, divisor = ("h", 3600) if longest > 7200 else ("min", 60) if longest > 180 else ("s", 1)
    series = [
        Series(label, [value / divisor for value in x], y, color)
        for color, (label, (x, y)) in enumerate(utilisation_lines(chosen))
    ]
    return Panel(title, series, "100", unit)


Lines = list[tuple[str, tuple[list[float], list[float]]]]


def utilisation_lines(chosen: Sequence[tuple[str, str, tuple[list[float], list[float]]]]) -> Lines:
    """(label, (seconds, percent)), so many that each has a colour of its own and no device is left out."""
    nodes: dict[str, Lines] = {}
    for rank, name, pair in chosen:
        device = name.split("/")[0].replace("gpu", "GPU ").replace("cpu", "CPU")
        nodes.setdefault(rank, []).append((device, pair))
    if len(chosen) <= MAX_LINES:
        return [
            (f"node {rank} {device}" if len(nodes) > 1 else device, pair)
            for rank, devices in nodes.items()
            for device, pair in devices
        ]
    kind = "CPUs" if chosen[0][1].startswith("cpu") else "GPUs"
    means = {rank: mean_over_time([pair for _, pair in devices]) for rank, devices in nodes.items()}
    if len(nodes) <= MAX_LINES:
        return [(f"node {rank}, mean of {len(nodes[rank])} {kind}", pair) for rank, pair in means.items()]
    by_mean = sorted(means, key=lambda rank: sum(means[rank][1]) / len(means[rank][1]))
    return [
        (f"all {len(nodes)} nodes, mean of {len(chosen)} {kind}", mean_over_time([pair for _, _, pair in chosen])),
        *(
            (f"node {rank}, the {which} busy", means[rank])
            for rank, which in ((by_mean[0], "least"), (by_mean[-1], "most"))
        ),
    ]


def confusion_figure(run: RunFacts) -> str:
    """An empty string where the run has no test counts."""
    if run.confusion is None:
        return ""
    names, counts = run.confusion
    right = sum(counts[i][i] for i in range(len(counts)))
    total = sum(map(sum, counts))
    return confusion_svg(f"Test set: {right:,} of {total:,} right", names, counts)


def calibration_figure(run: RunFacts) -> str:
    """How often the test was right over how sure it was, in fifteen bins; an empty string where it was not counted."""
    if not run.calibration:
        return ""
    confidence, accuracy = zip(*run.calibration, strict=True)
    series = [Series("accuracy", confidence, accuracy, 0), Series("as sure as right", (0, 1), (0, 1), 1, dashed=True)]
    return figure(f"Calibration of {run.run_id}", [Panel("Test accuracy over confidence", series, "%", "confidence")])


def comparison_figure(runs: Sequence[RunFacts], labels: Sequence[str]) -> str:
    """Training loss, validation accuracy and loss, and accuracy over time, a line for each of MAX_COMPARED runs."""
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
    return [Series(label, x, y, color, is_dashed(color)) for label, (x, y), color in curves if x]


def is_dashed(color: int) -> bool:
    """Every second line, and the other way round where the colours begin anew."""
    return (color % 2 == 1) != (color >= MAX_LINES)


def over_time_panel(shown: Sequence[tuple[RunFacts, str]]) -> Panel:
    """The same accuracy over the seconds of training: what a faster strategy is worth."""
    timed = [(label, seconds_at(run, run.curve("val/acc")), color) for color, (run, label) in enumerate(shown)]
    longest = max((x[-1] for _, (x, _), _ in timed if x), default=0.0)
    unit, divisor = ("h", 3600) if longest > 7200 else ("min", 60) if longest > 180 else ("s", 1)
    series = [
        Series(label, [value / divisor for value in x], y, color, is_dashed(color))
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
