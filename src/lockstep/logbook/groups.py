"""Groups of runs as the command line names them: KEY=VALUE,KEY=VALUE, or run ids with commas."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.keys import REPEATS
from lockstep.logbook.arms import ArmRun, Arms, best_of, refuse_equal_repeats
from lockstep.logbook.compare import not_held_fixed
from lockstep.logbook.folders import RecordedRun
from lockstep.process.errors import UserError
from lockstep.records.metric_names import is_lower_better, tested_name

EXAMPLE = "logbook.py compare augmentation=none augmentation=crop_flip"


def is_group(text: str) -> bool:
    """Return whether a text names several runs, and is no folder of one run."""
    return any(sign in text for sign in "=,") and not (Path(text) / "run.json").exists()


def name_of_group(text: str) -> str:
    """Return the name of a group: its conditions, or its first run and how many more."""
    parts = [part for part in text.split(",") if part]
    if "=" in text or len(parts) == 1:
        return text
    return f"{parts[0]} and {len(parts) - 1} more"


def runs_of_group(
    text: str, runs: Sequence[RecordedRun], find: Callable[[str], RecordedRun]
) -> list[RecordedRun]:
    """Return the runs of a group.

    Args:
        text: KEY=VALUE,KEY=VALUE, or run ids with commas.
        runs: all that a condition may choose.
        find: returns the run of an id.
    Raises:
        UserError: no run is of the group.
    """
    parts = [part for part in text.split(",") if part]
    if not all("=" in part for part in parts):
        return [find(part) for part in parts]
    chosen = list(runs)
    for part in parts:
        chosen = [run for run in chosen if _fits(run, part)]
    if not chosen:
        raise UserError(
            f"No run has {text}. Keys are those of logbook.py table, as optimizer.lr, augmentation "
            "or tags."
        )
    return chosen


def _fits(run: RecordedRun, condition: str) -> bool:
    """Return whether a run has the value of KEY=VALUE; a list, as tags, has it among others."""
    key, _, text = condition.partition("=")
    value = run.value(key)
    items = value if isinstance(value, list) else [value]
    return any(_equals(item, text) for item in items)


def _equals(value: Any, text: str) -> bool:
    if value is None or isinstance(value, bool):
        return str(value).lower() == text.lower().replace("null", "none")
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value) == text


def arms_of_groups(groups: dict[str, list[RecordedRun]]) -> Arms:
    """Return groups of runs as arms.

    Raises:
        UserError: there is nothing to compare, or runs of a group could not be told apart.
    """
    if len(groups) < 2:
        raise UserError(f"A comparison of groups needs at least two, as in {EXAMPLE}.")
    every = members_of(groups)
    monitors = sorted({run.record.monitor for run in every})
    if len(monitors) > 1:
        raise UserError(
            f"These runs have several metrics that choose the best: {', '.join(monitors)}. Add a "
            "condition to each group, as data=digits."
        )
    metric = monitors[0]
    runs = []
    for name, members in groups.items():
        runs += [_arm_run(name, run, metric) for run in members]
    refuse_equal_repeats(runs)
    # A plain script has no config.
    modes = {run.config.get("callbacks.checkpoints.mode") for run in every} - {None}
    minimize = "min" in modes if modes else is_lower_better(metric)
    return Arms(runs, metric, minimize)


def _arm_run(name: str, run: RecordedRun, metric: str) -> ArmRun:
    record = run.record
    repeats = []
    for key in REPEATS:
        value = run.config.get(key)
        # data.seed follows seed unless it is set.
        if value is not None and not (key == "data.seed" and value == record.seed):
            repeats.append(f"{key}={value}")
    is_finished = run.status == "finished"
    fold_ratio = 0.0
    if run.config.get("data.fold") is not None:
        fold_ratio = (record.num_val or 0) / (record.num_train or 1)
    return ArmRun(
        run.run_id,
        name,
        " ".join(repeats) or f"seed={record.seed}",
        best_of(record.metrics, metric) if is_finished else math.nan,
        best_of(record.metrics, tested_name(metric)),
        fold_ratio,
    )


def members_of(groups: dict[str, list[RecordedRun]]) -> list[RecordedRun]:
    """Return the runs of all groups."""
    return list(itertools.chain.from_iterable(groups.values()))


def differs_between(groups: dict[str, list[RecordedRun]], arms: Arms) -> str:
    """Name what is not held fixed between the runs of a pair; empty if nothing is."""
    runs = {run.run_id: run for run in members_of(groups)}
    first_of_arm: dict[str, ArmRun] = {}
    reference = {run.repeat: run for run in arms.runs if run.arm == arms.settings[0]}
    for run in arms.runs:
        if run.repeat in reference:
            first_of_arm.setdefault(run.arm, run)
    for run in first_of_arm.values():
        sentence = not_held_fixed([runs[reference[run.repeat].run_id], runs[run.run_id]])
        if sentence:
            return sentence
    return ""
