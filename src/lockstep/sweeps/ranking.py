"""Rank the jobs of a sweep, and group them into arms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lockstep.config.keys import FOLD_KEY, REPEAT_KEYS
from lockstep.config.schema import key_of
from lockstep.logbook.arms import BASELINE, ArmRun, Arms
from lockstep.process.errors import UserError
from lockstep.records.folder import RunFolder
from lockstep.records.metric_names import format_metric, is_lower_better

# A search has the long words, and checkpoints have the short ones.
DIRECTIONS = ("auto", "maximize", "minimize", "max", "min")


@dataclass(frozen=True)
class Job:
    """The end of one job of a sweep.

    Args:
        exit_code: the worst exit code of its SLURM tasks.
        value: the best value of the optimized metric; nan if the job failed or was pruned.
        tested: the test metric that belongs to it.
        fold_ratio: validation images per training image if the job is a fold; otherwise 0.
        pruned: the search ended this job early.
        folder: the folder of its run; empty if that lies in the folder of the sweep. A resumed
            trial keeps the folder of the search that began it.
    """

    number: int
    exit_code: int
    overrides: list[str]
    value: float
    tested: float = math.nan
    fold_ratio: float = 0.0
    pruned: bool = False
    folder: str = ""

    def run_folder(self, sweep_dir: Path) -> RunFolder:
        """Return the folder of its run."""
        return RunFolder(Path(self.folder or sweep_dir / f"{sweep_dir.name}_{self.number}"))

    @property
    def has_value(self) -> bool:
        """True if the job can be ranked."""
        return math.isfinite(self.value)


def is_minimized(config: Any) -> bool:
    """Return whether a lower optimized_metric is better.

    The sweeper's direction says so. If it is auto, the mode of the checkpoints says so, or the name
    of a metric that they do not monitor.

    Raises:
        UserError: the direction is unknown.
    """
    direction = OmegaConf.select(config, "hydra.sweeper.direction") or "auto"
    if direction not in DIRECTIONS:
        raise UserError(f"hydra.sweeper.direction={direction}: give {', '.join(DIRECTIONS)}.")
    if direction != "auto":
        return bool(direction.startswith("min"))

    checkpoints = OmegaConf.select(config, "callbacks.checkpoints")
    if checkpoints and checkpoints.monitor == config.optimized_metric:
        return bool(checkpoints.mode == "min")
    return is_lower_better(str(config.optimized_metric))


def format_ranking(jobs: Sequence[Job], arms: Arms, sweep_dir: Path) -> list[str]:
    """Return the ranking as lines, then the arms beside each other where seeds or folds repeat.

    The line of a job has the overrides that are not common to all jobs. Jobs without a value come
    last. If all jobs repeat one configuration with other seeds or folds, none is the best: their
    mean comes first, and they stay in order.

    Args:
        arms: the arms of the jobs.
    """
    metric = arms.metric
    if arms.has_only_repeats:
        return [*arms.lines(), *_format_jobs(jobs, sweep_dir, metric, f"{len(jobs)} jobs:")]

    ranked = [job for job in jobs if job.has_value]
    ranked.sort(key=lambda job: job.value, reverse=not arms.minimize)
    unranked = [job for job in jobs if not job.has_value]
    order = ", the lowest first" if arms.minimize else ""
    title = f"{len(jobs)} jobs by {metric}{order}:"
    if not ranked and any(job.exit_code == 0 for job in jobs):
        title = f"{len(jobs)} jobs, of which none logs {metric}:"
    lines = _format_jobs([*ranked, *unranked], sweep_dir, metric, title)
    if arms.has_repeats:
        lines += arms.lines()
    return [*lines, *arms.winner_lines()]


def _format_jobs(jobs: Sequence[Job], sweep_dir: Path, metric: str, title: str) -> list[str]:
    common = _find_common_overrides(jobs)
    lines = [title]
    for job in jobs:
        result = _format_result(job, metric)
        overrides = [override for override in job.overrides if override not in common]
        run_id = job.run_folder(sweep_dir).run_id
        lines.append(f"  {result}  {' '.join(overrides)}  {run_id}")
    return lines


def _format_result(job: Job, metric: str) -> str:
    """Return a job's value of the metric, or else how it ended."""
    if job.has_value:
        return f"{format_metric(metric, job.value):<12}"
    if job.pruned:
        return f"{'pruned':<12}"
    if job.exit_code == 0:
        return f"{'finished':<12}"
    return f"exit code {job.exit_code:<2}"


def _find_common_overrides(jobs: Sequence[Job]) -> set[str]:
    if len(jobs) < 2:
        return set()
    return set.intersection(*(set(job.overrides) for job in jobs))


def group_into_arms(jobs: Sequence[Job], sweep_dir: Path, metric: str, *, minimize: bool) -> Arms:
    """Return the jobs as arms: jobs of one arm differ only in their fold or seed."""
    common = _find_common_overrides(jobs)
    runs = []
    for job in jobs:
        overrides = [word for word in job.overrides if word not in common]
        repeats = [word for word in overrides if key_of(word) in REPEAT_KEYS]
        settings = [word for word in overrides if key_of(word) not in REPEAT_KEYS]
        run = ArmRun(
            job.run_folder(sweep_dir).run_id,
            " ".join(settings),
            " ".join(sorted(repeats)),
            job.value,
            job.tested,
            # A fold that all jobs share repeats nothing.
            job.fold_ratio if FOLD_KEY in map(key_of, repeats) else 0.0,
        )
        runs.append(run)
    if len({run.arm for run in runs}) > 1:
        # An arm that sets nothing of its own is that of against=baseline.
        runs = [run if run.arm else replace(run, arm=BASELINE) for run in runs]
    return Arms(runs, metric, minimize)
