"""Select the groups of runs that the command line names, and make arms of them.

A group is KEY=VALUE,KEY=VALUE, or run ids with commas. Arms are compared by pairs of runs that have
the same seed and fold.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep.config.keys import FOLD_KEY, REPEAT_KEYS
from lockstep.logbook.arms import ArmRun, Arms, best_of, refuse_equal_repeats
from lockstep.logbook.compare import caution_about, unfair_differences
from lockstep.logbook.folders import RecordedRun
from lockstep.process.errors import UserError
from lockstep.records.metric_names import is_lower_better, metric_of_test

EXAMPLE = "logbook.py compare augmentation=none augmentation=crop_flip"


def is_group_text(text: str) -> bool:
    """Return whether a text names a group of runs, and not the folder of one run."""
    return any(sign in text for sign in "=,") and not (Path(text) / "run.json").exists()


def shorten_names(texts: Sequence[str]) -> list[str]:
    """Return short names of groups. If two of them are equal, return the texts themselves."""
    names = [_short_name(text) for text in texts]
    return names if len(set(names)) == len(texts) else list(texts)


def _short_name(text: str) -> str:
    """Return the conditions of a group, or its first run and the number of the others."""
    parts = [part for part in text.split(",") if part]
    if "=" in text or len(parts) <= 1:
        return text
    return f"{parts[0]} and {len(parts) - 1} more"


def select_runs(
    text: str, runs: Sequence[RecordedRun], find_by_id: Callable[[str], RecordedRun]
) -> list[RecordedRun]:
    """Return the runs of a group.

    Args:
        text: KEY=VALUE,KEY=VALUE, or run ids with commas.
        runs: all runs among which conditions select.
        find_by_id: a function that returns the run with an id.
    Raises:
        UserError: the group has no run, or conditions and run ids are mixed.
    """
    parts = [part for part in text.split(",") if part]
    if not parts:
        raise UserError(f"{text} names no run: list run ids with commas, or give KEY=VALUE.")
    conditions = [part for part in parts if "=" in part]
    if not conditions:
        return [find_by_id(part) for part in parts]
    if len(conditions) < len(parts):
        raise UserError(f"{text} mixes conditions and run ids: a group is of one or the other.")
    chosen = list(runs)
    for condition in conditions:
        chosen = [run for run in chosen if _meets_condition(run, condition)]
    if not chosen:
        raise UserError(
            f"No run has {text}. Keys are those of logbook.py table, as optimizer.lr, augmentation "
            "or tags."
        )
    return chosen


def _meets_condition(run: RecordedRun, condition: str) -> bool:
    """Return whether a run has the value of KEY=VALUE. A list, as tags, must contain the value."""
    key, _, text = condition.partition("=")
    value = run.value(key)
    # Only an option that the run has can be none. Otherwise a mistyped KEY=none would select every
    # run.
    is_missing = not {key, f"choices.{key}"} & run.config.keys()
    if value is None and is_missing and not hasattr(run.record, key):
        return False
    items = value if isinstance(value, list) else [value]
    return any(_equals(item, text) for item in items)


def _equals(value: Any, text: str) -> bool:
    if value is None:
        return text.lower() in ("none", "null")
    if isinstance(value, bool):
        return str(value).lower() == text.lower()
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return str(value) == text


def make_arms(groups: dict[str, list[RecordedRun]]) -> Arms:
    """Return the arms of a comparison, one for each group.

    Raises:
        UserError: there are fewer than two groups, their runs have several monitored metrics, or a
            run or a seed occurs twice.
    """
    if len(groups) < 2:
        raise UserError(f"A comparison of groups needs at least two, as in {EXAMPLE}.")
    all_runs = flatten_groups(groups)
    monitors = sorted({run.record.monitor for run in all_runs})
    if len(monitors) > 1:
        raise UserError(
            f"These runs have several metrics that choose the best: {', '.join(monitors)}. Add a "
            "condition to each group, as data=digits."
        )
    metric = monitors[0]
    runs = []
    for name, members in groups.items():
        runs += [_arm_run(name, run, metric) for run in members]
    if len({run.config.get(FOLD_KEY) for run in all_runs}) == 1:
        # A fold that all runs share repeats nothing.
        runs = [replace(run, fold_ratio=0.0) for run in runs]
    refuse_equal_repeats(runs)
    _refuse_shared_runs(runs)
    # A run of a script of one's own has no config.
    modes = {run.config.get("callbacks.checkpoints.mode") for run in all_runs} - {None}
    minimize = "min" in modes if modes else is_lower_better(metric)
    return Arms(runs, metric, minimize)


def _refuse_shared_runs(runs: Sequence[ArmRun]) -> None:
    """Raise UserError if a run would be counted twice, or paired with itself."""
    run_id, count = Counter(run.run_id for run in runs).most_common(1)[0]
    if count > 1:
        raise UserError(
            f"{run_id} is in several groups, or twice in one. Add a condition that tells the "
            "groups apart, or list each run id once."
        )


def _arm_run(name: str, run: RecordedRun, metric: str) -> ArmRun:
    record = run.record
    repeats = []
    for key in REPEAT_KEYS:
        value = run.config.get(key)
        # data.seed equals seed unless it is set.
        if value is not None and not (key == "data.seed" and value == record.seed):
            repeats.append(f"{key}={value}")
    is_finished = run.status == "finished"
    fold_ratio = 0.0
    if run.config.get("data.fold") is not None:
        fold_ratio = (record.num_val or 0) / (record.num_train or 1)
    return ArmRun(
        run_id=run.run_id,
        arm=name,
        repeat=" ".join(repeats) or f"seed={record.seed}",
        value=best_of(record.metrics, metric) if is_finished else math.nan,
        test_value=best_of(record.metrics, metric_of_test(metric)),
        fold_ratio=fold_ratio,
    )


def flatten_groups(groups: dict[str, list[RecordedRun]]) -> list[RecordedRun]:
    """Return the runs of all groups."""
    return list(itertools.chain.from_iterable(groups.values()))


def caution_about_pairs(groups: dict[str, list[RecordedRun]], arms: Arms) -> str:
    """Return a sentence on what differs within pairs but not in a fair comparison, else ""."""
    runs = {run.run_id: run for run in flatten_groups(groups)}
    finished = [run for run in arms.runs if math.isfinite(run.value)]
    reference = {run.repeat: run for run in finished if run.arm == arms.settings[0]}
    differing: list[str] = []
    for run in finished:
        if run.repeat in reference:
            pair = [runs[reference[run.repeat].run_id], runs[run.run_id]]
            differing += unfair_differences(pair)
    return caution_about(differing)
