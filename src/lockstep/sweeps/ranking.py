"""The ranking of a sweep's jobs."""

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from lockstep.config.keys import REPEATS
from lockstep.config.schema import key_of
from lockstep.process.output import as_read, tested_name

# Names of metrics of which the lower one is better.
ERRORS = re.compile(r"loss|error|(?<![a-z])(mse|mae|rmse|ece|nll)(?![a-z])")


@dataclass(frozen=True)
class Job:
    """The end of one job of a sweep.

    Args:
        code: the worst exit code of its SLURM tasks.
        value: the best value of the optimized metric; nan if the job failed or was pruned.
        tested: the test metric that belongs to it.
        pruned: its search gave it up.
    """

    number: int
    code: int
    overrides: list[str]
    value: float
    tested: float = math.nan
    pruned: bool = False

    @property
    def has_failed(self) -> bool:
        return not math.isfinite(self.value)


def is_minimized(config: Any) -> bool:
    """Return whether a lower optimized_metric is better.

    The sweeper's direction says it, or the callback of checkpoints, or the name.
    """
    direction = OmegaConf.select(config, "hydra.sweeper.direction")
    if direction in ("minimize", "maximize"):
        return bool(direction == "minimize")

    checkpoints = OmegaConf.select(config, "callbacks.checkpoints")
    if checkpoints and checkpoints.monitor == config.optimized_metric:
        return bool(checkpoints.mode == "min")
    return bool(ERRORS.search(str(config.optimized_metric)))


def ranking(jobs: Sequence[Job], sweep_name: str, metric: str, *, minimize: bool) -> list[str]:
    """Return the ranking as lines, then the means of jobs that differ in fold or seed alone.

    The line of a job has the overrides that are not common to all jobs. Failed jobs are the last.
    """
    finished = [job for job in jobs if not job.has_failed]
    finished.sort(key=lambda job: job.value, reverse=not minimize)
    ranked = [*finished, *(job for job in jobs if job.has_failed)]
    common = _common_overrides(jobs)

    order = ", the lowest first" if minimize else ""
    title = f"{len(jobs)} jobs by {metric}{order}:"
    if all(job.has_failed for job in jobs) and any(job.code == 0 for job in jobs):
        title = f"{len(jobs)} jobs, of which none logs {metric}:"
    lines = [title]
    for job in ranked:
        result = _result(job, metric)
        overrides = [override for override in job.overrides if override not in common]
        lines.append(f"  {result}  {' '.join(overrides)}  {sweep_name}_{job.number}")
    return [*lines, *_means(ranked, common, metric)]


def _result(job: Job, metric: str) -> str:
    """Return a job's value of the metric, or else how it ended."""
    if not job.has_failed:
        return f"{as_read(metric, job.value):<12}"
    if job.pruned:
        return f"{'pruned':<12}"
    if job.code == 0:
        return f"{'finished':<12}"
    return f"exit code {job.code:<2}"


def _common_overrides(jobs: Sequence[Job]) -> set[str]:
    if len(jobs) < 2:
        return set()
    return set.intersection(*(set(job.overrides) for job in jobs))


def _means(jobs: Iterable[Job], common: set[str], metric: str) -> Iterator[str]:
    """Yield mean ± standard deviation of each group of jobs that differ in fold or seed alone."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        settings = []
        for override in job.overrides:
            if override not in common and key_of(override) not in REPEATS:
                settings.append(override)
        groups.setdefault(" ".join(settings), []).append(job)

    for settings_of_group, group in groups.items():
        means = [
            *_mean(metric, [job.value for job in group]),
            *_mean(tested_name(metric), [job.tested for job in group]),
        ]
        if means:
            parts = [f"{len(group)} jobs", *means, settings_of_group]
            yield "  mean of " + " · ".join(filter(None, parts))


def _mean(name: str, values: Sequence[float]) -> Iterator[str]:
    """Yield the mean of a metric, or nothing where a job lacks it."""
    if len(values) > 1 and all(map(math.isfinite, values)):
        mean = as_read(name, statistics.fmean(values))
        yield f"{name} {mean} ± {as_read(name, statistics.stdev(values))}"
