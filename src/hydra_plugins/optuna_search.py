"""Hydra's -m as an Optuna search: one study, one job a trial; a failed trial is told and passed over.

    python src/train.py -m hydra/sweeper=optuna hydra.sweeper.study=night hydra.sweeper.num_trials=30 \\
      'optimizer.lr=tag(log,interval(1e-4,1e-1))' 'classifier.label_smoothing=choice(0.0,0.1)' trainer=ddp_sim

The study lies in a journal file: the same command again goes on until num_trials have finished. (The sweeper plugin
on the package index is held at Optuna 2, whose storage no longer works with today's SQLAlchemy.)
"""

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

from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)


class OptunaSearch(Sweeper):
    """
    Args:
        study: names the search; the same name goes on with it.
        num_trials: trials that shall have finished in the end, over all starts.
        direction: maximize or minimize optimized_metric.
        folder: where the journal lies.
        seed: of Optuna's sampler (TPE).
    """

    def __init__(self, study: str, num_trials: int, direction: str, folder: str, seed: int | None) -> None:
        self.study, self.num_trials, self.direction, self.seed = study, num_trials, direction, seed
        self.folder = Path(folder)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        overrides = OverridesParser.create().parse_overrides(arguments)
        searched = [override for override in overrides if override.is_sweep_override()]
        if not searched:
            raise UserError("Nothing to search: give a key a range, as 'optimizer.lr=tag(log,interval(1e-4,1e-1))'.")
        fixed = [f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in overrides if o not in searched]
        study = self._open(optuna)
        first = len(study.trials)
        for job in range(2 * self.num_trials):  # as many again may fail
            if len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE])) >= self.num_trials:
                break
            self._run(optuna, study, searched, fixed, first + job)
        self._report(study)

    def _open(self, optuna: Any) -> Any:
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = optuna.storages.journal.JournalFileBackend(str(self.folder / f"{self.study}.journal"))
        study = optuna.create_study(
            storage=optuna.storages.JournalStorage(journal), study_name=self.study, direction=self.direction,
            load_if_exists=True,
        )  # fmt: skip
        # The same seed in a second start would propose what the first one has tried.
        seed = None if self.seed is None else self.seed + len(study.trials)
        study.sampler = optuna.samplers.TPESampler(seed=seed)
        return study

    def _run(self, optuna: Any, study: Any, searched: list[Override], fixed: list[str], number: int) -> None:
        trial = study.ask()
        chosen = [f"{override.get_key_element()}={suggest(trial, override)}" for override in searched]
        (done,) = self.launcher.launch([tuple([*fixed, *chosen])], initial_job_idx=number)
        value = float(done.return_value) if done.return_value is not None else math.nan
        if math.isfinite(value):
            study.tell(trial, value)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        log.info(f"trial {trial.number}: {' '.join(chosen)} → {value if math.isfinite(value) else 'failed'}")

    def _report(self, study: Any) -> None:
        if not any(trial.value is not None for trial in study.trials):
            raise UserError(f"No trial of the study {self.study} has finished: look at their run.json.")
        best = study.best_trial
        words = " ".join(f"{key}={value}" for key, value in best.params.items())
        log.info(f"best of {len(study.trials)} trials: {best.value:.6g} with {words}")


def suggest(trial: Any, override: Override) -> Any:
    """The trial's value for one searched key.

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
