"""The figure of a sweep: single runs as points, means, and their 95 % intervals."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.logbook.arms import Arm, Arms
from lockstep.logbook.figures import STYLE
from lockstep.logbook.render import is_share

MAX_ARMS = 20
LONGEST_NAME = 48  # characters
WIDTH = 10.0  # inches
KEY_HEIGHT = 3.0  # inches
ARM_HEIGHT = 0.4  # inches
AXIS_HEIGHT = 1.0  # inches
# A key whose largest value is so many times the smallest one has a logarithmic axis.
LOGARITHMIC = 20


def write_sweep_figure(
    path: Path, arms: Arms, numeric_keys: Mapping[str, Mapping[str, float]]
) -> bool:
    """Write the figure; remove it if there is nothing to draw.

    Args:
        numeric_keys: of each key the number that each run has of it.
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
        parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)
        for part, (_, draw) in zip(parts.flat, rows, strict=True):
            draw(part)
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return True


def _scale(arms: Arms) -> int:
    return 100 if is_share(arms.metric) else 1


def _label(arms: Arms) -> str:
    return f"{arms.metric} in %" if is_share(arms.metric) else arms.metric


def _draw_arms(part: Any, arms: Arms) -> None:
    """Draw a row for each arm, the best one on top."""
    ax = part.subplots()
    names = []
    for row, arm in enumerate(arms.ranked):
        scale = _scale(arms)
        values = [scale * run.value for run in arm.runs]
        ax.plot(values, [row] * len(values), "o", color="C0", alpha=0.5, markersize=4)
        width = scale * arm.values.half_width
        if len(values) > 1:
            ax.plot(scale * arm.values.mean, row, "|", color="C1", markersize=14, markeredgewidth=2)
        if math.isfinite(width):
            ax.errorbar(scale * arm.values.mean, row, xerr=width, color="C1", capsize=3)
        names.append(_name(arm))
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(xlabel=_label(arms))


def _name(arm: Arm) -> str:
    if len(arm.name) > LONGEST_NAME:
        return f"{arm.name[: LONGEST_NAME - 1]}…"
    return arm.name or f"{len(arm.runs)} runs"


def _draw_keys(part: Any, arms: Arms, numeric_keys: Mapping[str, Mapping[str, float]]) -> None:
    axes = part.subplots(1, len(numeric_keys), squeeze=False)
    for ax, (key, numbers) in zip(axes.flat, numeric_keys.items(), strict=True):
        _draw_key(ax, arms, key, numbers)


def _draw_key(ax: Any, arms: Arms, key: str, numbers: Mapping[str, float]) -> None:
    """Draw the metric of each run against its number, and the mean of each number."""
    values_at: dict[float, list[float]] = {}
    for arm in arms.ranked:
        for run in arm.runs:
            values_at.setdefault(numbers[run.run_id], []).append(_scale(arms) * run.value)
    for number, values in values_at.items():
        ax.plot([number] * len(values), values, "o", color="C0", alpha=0.5, markersize=4)
    along = sorted(values_at)
    means = [sum(values_at[number]) / len(values_at[number]) for number in along]
    ax.plot(along, means, color="C1")
    if min(along) > 0 and max(along) / min(along) >= LOGARITHMIC:
        ax.set_xscale("log")
    ax.set(xlabel=key, ylabel=_label(arms))
