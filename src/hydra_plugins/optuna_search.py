"""Hydra's -m as an Optuna search: one study, one job a trial; a failed trial is recorded and skipped.

    python src/train.py -m experiment=quickstart hydra/sweeper=optuna hydra.sweeper.num_trials=30 \\
      'optimizer.lr=tag(log,interval(1e-4,1e-1))' 'task.label_smoothing=choice(0.0,0.1)'

The study is in a journal file, named by what is searched: the same command goes on until num_trials have finished. (The
sweeper plugin on the package index requires Optuna 2, whose storage does not work with today's SQLAlchemy.)
"""

import hashlib
import logging
import math
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from lockstep.commands.sweep import is_minimized
from lockstep.runs.errors import EXIT_USER_ERROR, UserError

log = logging.getLogger(__name__)


class OptunaSearch(Sweeper):
    """Search the ranges of the command line with TPE.

    Args:
        study: name of the search; None: one made of what is searched, so that another search has another study.
        num_trials: trials that have finished in the end, over all starts.
        direction: maximize or minimize optimized_metric; auto: as the checkpoints' mode.
        folder: for the journal.
        seed: of Optuna's sampler.
    """

    def __init__(self, study: str | None, num_trials: int, direction: str, folder: str, seed: int | None) -> None:
        self.study, self.num_trials, self.direction, self.seed = study, num_trials, direction, seed
        self.folder = Path(folder)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.direction = "minimize" if is_minimized(config) else "maximize"
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        try:
            self._search(arguments)
        except UserError as error:  # Hydra would print a traceback
            log.error(str(error))
            raise SystemExit(EXIT_USER_ERROR) from None

    def _search(self, arguments: list[str]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        overrides = OverridesParser.create().parse_overrides(arguments)
        searched = [override for override in overrides if override.is_sweep_override()]
        if not searched:
            raise UserError("Nothing to search: give a key a range, as 'optimizer.lr=tag(log,interval(1e-4,1e-1))'.")
        fixed = [f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in overrides if o not in searched]
        study = self._open(optuna, sorted(str(override.input_line) for override in searched), sorted(fixed))
        at_once = self.launcher.at_once()[0] if hasattr(self.launcher, "at_once") else 1
        first, limit = len(study.trials), len(study.trials) + 2 * self.num_trials  # as many again may fail
        while (left := self.num_trials - _finished(study)) > 0 and first < limit:
            trials = [study.ask() for _ in range(min(at_once, left))]
            jobs = [[f"{o.get_key_element()}={suggest(trial, o)}" for o in searched] for trial in trials]
            done = self.launcher.launch([tuple([*fixed, *job]) for job in jobs], initial_job_idx=first)
            for trial, job, result in zip(trials, jobs, done, strict=True):
                value = float(result.return_value) if result.return_value is not None else math.nan
                if is_number := math.isfinite(value):
                    study.tell(trial, value)
                else:
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)
                log.info(f"trial {trial.number}: {' '.join(job)} → {value if is_number else 'failed'}")
            first += len(trials)
        if not _finished(study):
            raise UserError(f"No trial of the study {study.study_name} has finished: look at their run.json.")
        best = study.best_trial
        words = " ".join(f"{key}={value}" for key, value in best.params.items())
        log.info(f"best of {len(study.trials)} trials: {best.value:.6g} with {words}")

    def _open(self, optuna: Any, searched: list[str], fixed: list[str]) -> Any:
        metric = str(self.config.optimized_metric)
        told = "\n".join([self.direction, metric, *searched, *fixed])
        name = self.study or f"search-{hashlib.sha256(told.encode()).hexdigest()[:8]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.journal"
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
        asked = {"direction": self.direction, "metric": metric, "searched": searched}
        known = next((s for s in optuna.get_all_study_summaries(storage) if s.study_name == name), None)
        for key, value in known.user_attrs.items() if known else ():
            if asked.get(key, value) != value:
                raise UserError(
                    f"The study {name} has another {key} ({value}, now {asked[key]}): give hydra.sweeper.study=NAME "
                    f"for a new search, or remove {path}."
                )
        study = optuna.create_study(storage=storage, study_name=name, direction=self.direction, load_if_exists=True)
        for key, value in asked.items():
            study.set_user_attr(key, value)
        log.info(f"study {name} in {path}: {len(study.trials)} trials so far")
        # The same seed in a second start would propose what the first one has tried.
        seed = None if self.seed is None else self.seed + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        return study


def _finished(study: Any) -> int:
    return sum(trial.value is not None for trial in study.trials)


def suggest(trial: Any, override: Override) -> Any:
    """Return the trial's value for one searched key.

    Raises:
        UserError: a sweep that is no interval, range or choice.
    """
    key, value = override.get_key_element(), cast(Any, override.value())
    log = "log" in getattr(value, "tags", ())
    if isinstance(value, IntervalSweep):
        kind = trial.suggest_int if isinstance(value.start, int) and isinstance(value.end, int) else trial.suggest_float
        return kind(key, value.start, value.end, log=log)
    if isinstance(value, RangeSweep):
        numbers = [cast(float, number) for number in (value.start, value.stop, value.step)]
        if any(number != int(number) for number in numbers):
            raise UserError(f"{override.input_line}: a range of whole numbers, or an interval.")
        start, stop, step = map(int, numbers)
        return trial.suggest_int(key, start, stop - 1, step=step)
    if isinstance(value, ChoiceSweep):
        return trial.suggest_categorical(key, list(override.sweep_string_iterator()))
    given = (override.input_line or "").partition("=")[2]
    raise UserError(f"{key} cannot be searched over {given}: use interval, range or choice.")
