"""Search ranges with Optuna: one study in a journal file, which the same command continues."""

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override

from lockstep.process.errors import UserError
from lockstep.sweeps.ranking import is_minimized

log = logging.getLogger(__name__)

# Runs jobs, given the overrides of each and the number of the first; returns how each has ended.
RunJobs = Callable[[Sequence[Sequence[str]], int], Sequence[Any]]


class Search:
    """A search over the ranges of a command line, one job for each trial.

    Failed trials are skipped.

    Args:
        overrides: of the command line, parsed.
        config: of the sweep, with `optimized_metric` and Hydra's node.
        study_name: None: made from the search space, so that another search has another study.
        folder: of the journal.
        seed: of Optuna's sampler.
    """

    def __init__(
        self,
        overrides: list[Override],
        config: Any,
        study_name: str | None,
        folder: Path,
        seed: int | None,
    ) -> None:
        self.ranges = [override for override in overrides if override.is_sweep_override()]
        if not self.ranges:
            raise UserError(
                "Nothing to search. Pass a range, such as "
                "'optimizer.lr=tag(log,interval(1e-4,1e-1))'."
            )
        self.fixed = [
            f"{override.get_key_element()}={override.get_value_element_as_str()}"
            for override in overrides
            if override not in self.ranges
        ]
        self.config = config
        self.study = self._open(study_name, folder, seed)

    def run(self, num_trials: int, at_once: int, run_jobs: RunJobs) -> None:
        """Run trials until `num_trials` have finished, over all starts; at most as many may fail.

        Raises:
            UserError: no trial has finished.
        """
        first = len(self.study.trials)
        limit = first + 2 * num_trials
        while first < limit:
            left = num_trials - self._number_finished()
            if left <= 0:
                break
            first += self._run_trials(min(at_once, left), first, run_jobs)

        if not self._number_finished():
            raise UserError(
                f"No trial of the study {self.study.study_name} has finished. Their output states "
                "the errors."
            )
        best = self.study.best_trial
        settings = " ".join(f"{key}={value}" for key, value in best.params.items())
        log.info(f"best of {len(self.study.trials)} trials: {best.value:.6g} with {settings}")

    def _run_trials(self, number: int, first: int, run_jobs: RunJobs) -> int:
        """Run so many trials at once, and tell the study how each has ended.

        Returns:
            their number.
        """
        trials = [self.study.ask() for _ in range(number)]
        settings = [self._settings(trial) for trial in trials]
        results = run_jobs([(*self.fixed, *job) for job in settings], first)
        for trial, job, result in zip(trials, settings, results, strict=True):
            value = math.nan if result.return_value is None else float(result.return_value)
            self._tell(trial, value)
            outcome = value if math.isfinite(value) else "failed"
            log.info(f"trial {trial.number}: {' '.join(job)} → {outcome}")
        return number

    def _settings(self, trial: Any) -> list[str]:
        """Return the overrides that a trial searches."""
        return [
            f"{override.get_key_element()}={suggest(trial, override)}" for override in self.ranges
        ]

    def _tell(self, trial: Any, value: float) -> None:
        from optuna.trial import TrialState

        if math.isfinite(value):
            self.study.tell(trial, value)
        else:
            self.study.tell(trial, state=TrialState.FAIL)

    def _number_finished(self) -> int:
        return sum(trial.value is not None for trial in self.study.trials)

    def _open(self, study_name: str | None, folder: Path, seed: int | None) -> Any:
        """Return the study, new or from its journal; refuse the study of another search."""
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = "minimize" if is_minimized(self.config) else "maximize"
        ranges = sorted(str(override.input_line) for override in self.ranges)
        space = [direction, str(self.config.optimized_metric), *ranges]
        name = study_name or _name_of_search([*space, *sorted(self.fixed)])

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.journal"
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(
            storage=storage, study_name=name, direction=direction, load_if_exists=True
        )
        before = study.user_attrs.get("search", space)
        if before != space:
            raise UserError(
                f"The study {name} is another search ({' '.join(before)}): pass "
                f"hydra.sweeper.study=NAME for a new one, or remove {path}."
            )
        study.set_user_attr("search", space)
        log.info(f"study {name} in {path}: {len(study.trials)} trials so far")

        # With the same seed a second start would propose the trials of the first one again.
        sampler_seed = None if seed is None else seed + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=sampler_seed)
        return study


def _name_of_search(parts: list[str]) -> str:
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"search-{digest[:8]}"


def suggest(trial: Any, override: Override) -> Any:
    """Return the trial's value for one searched key: a number in its interval, or a choice."""
    key = override.get_key_element()
    value = override.value()
    if not isinstance(value, IntervalSweep):
        return trial.suggest_categorical(key, list(override.sweep_string_iterator()))

    log_scale = "log" in value.tags
    if isinstance(value.start, int) and isinstance(value.end, int):
        return trial.suggest_int(key, value.start, value.end, log=log_scale)
    return trial.suggest_float(key, value.start, value.end, log=log_scale)
