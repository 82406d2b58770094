"""Group runs by their settings into arms, and compare arms by the pairs that share seed and fold.

The runs are the jobs of a sweep, or those of a comparison of groups.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lockstep.logbook.paired import Sample, describe_difference
from lockstep.logbook.render import is_share
from lockstep.process.errors import UserError
from lockstep.records.metric_names import format_metric, metric_of_test

PERCENT = 100
DIGITS = 10
CAUTION_ABOUT_SEVERAL = (
    "Each interval is 95 % by itself: of twenty equal settings one is likely to seem different."
)
# The arm of against=baseline, which changes no setting.
BASELINE = "baseline"


@dataclass(frozen=True)
class ArmRun:
    """One run of an arm.

    Args:
        arm: the settings that only the runs of its arm have, as optimizer.lr=0.01.
        repeat: the settings that one run of each other arm shares, as seed=1 data.fold=0.
        value: the ranking metric in validation; nan if the run failed.
        test_value: the same metric in the test; nan if there is none.
        fold_ratio: validation images per training image if folds are repeated, otherwise 0.
    """

    run_id: str
    arm: str
    repeat: str
    value: float
    test_value: float = math.nan
    fold_ratio: float = 0.0


@dataclass(frozen=True)
class Arm:
    """The finished runs of the same settings, at least one."""

    name: str
    runs: Sequence[ArmRun]

    @property
    def values(self) -> Sample:
        return self._sample([run.value for run in self.runs])

    @property
    def test_sample(self) -> Sample | None:
        """The test metric of all runs; None if a run lacks it."""
        values = [run.test_value for run in self.runs]
        return self._sample(values) if all(map(math.isfinite, values)) else None

    def _sample(self, values: Sequence[float]) -> Sample:
        return Sample(values, max(run.fold_ratio for run in self.runs))


@dataclass(frozen=True)
class Comparison:
    """A comparison of an arm with the reference, by the pairs of runs that share seed and fold.

    Args:
        differences: arm minus reference. For a share they are percentage points.
    """

    arm: str
    reference: str
    differences: Sample
    sentence: str


@dataclass(frozen=True)
class Arms:
    """The arms of a sweep, or of a comparison of groups.

    Args:
        runs: the runs in order. The arm of the first run is the reference of the other arms.
        metric: the ranking metric in validation.
        minimize: whether a lower value is better.
    """

    runs: Sequence[ArmRun]
    metric: str
    minimize: bool

    @cached_property
    def ranked(self) -> list[Arm]:
        """The arms with a finished run, the best mean first."""
        arms = []
        for name in self.settings:
            # A search may try the same settings and seed again, which says nothing more.
            runs: dict[str, ArmRun] = {}
            for run in self.runs:
                if run.arm == name and math.isfinite(run.value):
                    runs.setdefault(run.repeat, run)
            if runs:
                arms.append(Arm(name, list(runs.values())))
        return sorted(arms, key=lambda arm: arm.values.mean, reverse=not self.minimize)

    @property
    def settings(self) -> list[str]:
        """The names of all arms in order, also if all of their runs failed."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    @property
    def has_repeats(self) -> bool:
        """True if several seeds or folds were run."""
        return len({run.repeat for run in self.runs}) > 1

    @property
    def has_only_repeats(self) -> bool:
        """True if the runs differ only in seed or fold."""
        return self.has_repeats and len(self.settings) == 1

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """The comparisons of all other arms with the reference, if they share a seed or fold."""
        arms = {arm.name: arm for arm in self.ranked}
        first, *others = self.settings
        if not self.has_repeats or first not in arms:
            return []
        compared = [
            self._compare_to_reference(arms[name], arms[first]) for name in others if name in arms
        ]
        return [comparison for comparison in compared if comparison]

    def _compare_to_reference(self, arm: Arm, reference: Arm) -> Comparison | None:
        values = {run.repeat: run.value for run in reference.runs}
        scale = PERCENT if is_share(self.metric) else 1
        differences = []
        for run in arm.runs:
            if run.repeat in values:
                # Further digits are only errors of floating point.
                difference = round(scale * (run.value - values[run.repeat]), DIGITS)
                differences.append(difference)
        if not differences:
            return None
        sample = Sample(differences, arm.values.fold_ratio)
        text = describe_difference(sample, minimize=self.minimize, unit=unit_of(self.metric))
        return Comparison(arm.name, reference.name, sample, text)

    @property
    def remarks(self) -> list[str]:
        """Sentences on runs that count in no mean, and on arms that are compared with nothing."""
        sentences = []
        left_out = [run.run_id for run in self.runs if not math.isfinite(run.value)]
        if left_out:
            sentences.append(f"Left out, not finished with {self.metric}: {', '.join(left_out)}.")
        reference = self.settings[0]
        compared = {reference, *(comparison.arm for comparison in self.comparisons)}
        names = [arm.name for arm in self.ranked]
        if self.has_repeats and reference in names:
            for name in names:
                if name not in compared:
                    sentences.append(
                        f"No run of {name} has the seed and fold of one of {reference}."
                    )
        return sentences

    def lines(self) -> list[str]:
        """Return the arms, the best mean first, and the comparisons, for a terminal."""
        if not self.ranked:
            return []
        lines = [f"{self.metric}, mean ± standard error:"]
        for arm in self.ranked:
            lines.append("  " + " · ".join(filter(None, self._line_parts(arm))))
        for comparison in self.comparisons:
            names = f"{comparison.arm} against {comparison.reference}"
            lines.append(f"  {names}: {comparison.sentence}")
        if len(self.comparisons) > 1:
            lines.append(f"  {CAUTION_ABOUT_SEVERAL}")
        return lines

    def _line_parts(self, arm: Arm) -> Iterable[str]:
        """Yield the parts of the line of an arm."""
        yield f"{format_mean_and_error(self.metric, arm.values)} of {count_of_runs(arm)}"
        if len(arm.runs) > 1:
            yield f"deviation {format_metric(self.metric, arm.values.deviation)}"
        if len(self.settings) == 1:
            yield self.test_text(arm)
        yield arm.name

    @property
    def unit(self) -> str:
        return unit_of(self.metric)

    def winner_lines(self) -> list[str]:
        """Return the arm with the best mean, its test metric, and how many arms were tried.

        The test metric of other arms is not shown, because a choice by it would need another test.
        """
        if len(self.ranked) < 2:
            return []
        best = self.ranked[0]
        tried = f"{len(self.settings)} settings were tried on the same validation images"
        name = f"best: {best.name}"
        total = len({run.repeat for run in self.runs if run.arm == best.name})
        if len(best.runs) < total:
            # The settings that fail for some seeds are seldom the best ones.
            name += f" (by {len(best.runs)} of its {total} runs)"
        return [" · ".join(filter(None, [name, self.test_text(best), tried]))]

    def test_text(self, arm: Arm) -> str:
        """Return the test metric of an arm; "" if a run lacks it."""
        name = metric_of_test(self.metric)
        return f"{name} {format_mean_and_error(name, arm.test_sample)}" if arm.test_sample else ""


def count_of_runs(arm: Arm) -> str:
    unit = "fold" if arm.values.fold_ratio else "run"
    return f"{len(arm.runs)} {unit}{'s' if len(arm.runs) > 1 else ''}"


def format_mean_and_error(metric: str, sample: Sample) -> str:
    """Return "95.10% ± 0.40%", the mean with its standard error, or the only value."""
    mean = format_metric(metric, sample.mean)
    if len(sample.values) == 1:
        return mean
    return f"{mean} ± {format_metric(metric, sample.error)}"


def unit_of(metric: str) -> str:
    return "points" if is_share(metric) else ""


def best_of(metrics: Mapping[str, Any], name: str) -> float:
    """Return the best value of a metric, or else the last one; nan without any."""
    for key in (f"{name}_best", name):
        if metrics.get(key) is not None:
            return float(metrics[key])
    return math.nan


def refuse_equal_repeats(runs: Iterable[ArmRun]) -> None:
    """Raise UserError if two runs of an arm have the same seed and fold: pairs would be unclear."""
    first: dict[tuple[str, str], str] = {}
    for run in runs:
        other = first.setdefault((run.arm, run.repeat), run.run_id)
        if other != run.run_id:
            raise UserError(
                f"{other} and {run.run_id} of {run.arm} both have {run.repeat}. Add a condition "
                "that tells them apart, as KEY=VALUE,data=digits, or list the run ids."
            )


def arms_as_json(arms: Arms) -> dict[str, Any]:
    """Return the JSON values of arms and comparisons for sweep.json."""
    arm_records = []
    for arm in arms.ranked:
        record = {"arm": arm.name, "runs": [run.run_id for run in arm.runs]}
        arm_records.append(record | _statistics(arm.values))
    comparisons = []
    for comparison in arms.comparisons:
        record = {"arm": comparison.arm, "against": comparison.reference}
        record |= _statistics(comparison.differences)
        comparisons.append(record | {"sentence": comparison.sentence})
    return {"arms": arm_records, "comparisons": comparisons}


def _statistics(sample: Sample) -> dict[str, Any]:
    statistics = {
        "mean": sample.mean,
        "deviation": sample.deviation,
        "standard_error": sample.error,
        "half_of_95_percent_interval": sample.half_width,
    }
    finite = {name: value for name, value in statistics.items() if math.isfinite(value)}
    return {"count": len(sample.values), **finite}
