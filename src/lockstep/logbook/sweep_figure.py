"""The figure of a sweep: single runs as points, means, and their 95 % intervals."""

import math
from collections.abc import Mapping
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
    keys = list(numeric_keys)
    draws_arms = len(arms.ranked) <= MAX_ARMS and (arms.has_repeats or not keys)
    num_finished = sum(len(arm.runs) for arm in arms.ranked)
    if num_finished < 2 or not (draws_arms or keys):
        return False

    import matplotlib
    from matplotlib.figure import Figure

    heights = [1.0 + ARM_HEIGHT * len(arms.ranked)] if draws_arms else []
    if keys:
        heights.append(KEY_HEIGHT)
    with matplotlib.rc_context(fname=STYLE):
        figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
        rows = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat)
        if draws_arms:
            _draw_arms(rows[0].subplots(), arms)
        if keys:
            axes = rows[-1].subplots(1, len(keys), squeeze=False)
            for ax, key in zip(axes.flat, keys, strict=True):
                _draw_key(ax, arms, key, numeric_keys[key])
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return True


def _scale(arms: Arms) -> int:
    return 100 if is_share(arms.metric) else 1


def _label(arms: Arms) -> str:
    return f"{arms.metric} in %" if is_share(arms.metric) else arms.metric


def _draw_arms(ax: Any, arms: Arms) -> None:
    """Draw a row for each arm, the best one on top."""
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
