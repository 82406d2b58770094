"""Hydra plugins for -m: jobs side by side on this machine, and a search of ranges with Optuna.

    python src/train.py -m experiment=quickstart optimizer.lr=1e-3,1e-2 seed=1,2
    python src/train.py -m experiment=quickstart hydra/sweeper=optuna hydra.sweeper.num_trials=30 \\
      'optimizer.lr=tag(log,interval(1e-4,1e-1))' 'task.label_smoothing=choice(0.0,0.1)'
"""

import hashlib
import logging
import math
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lockstep.process.environment import JOBS, environment, visible_gpus
from lockstep.process.errors import EXIT_USER_ERROR, UserError
from lockstep.sweeps import jobs as sweep

log = logging.getLogger(__name__)


class LocalJobs(Launcher):
    """Run each job in a child process.

    Args:
        n_jobs: number of jobs at the same time; None: one for each GPU (or group of `trainer.devices` GPUs), one on a
            CPU. With 1 a job sees all GPUs.
    """

    def __init__(self, n_jobs: int | None = None) -> None:
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def at_once(self) -> tuple[int, list[str]]:
        """Return the number of jobs at the same time, and the GPUs of each as CUDA_VISIBLE_DEVICES."""
        trainer, environ = self.config.trainer, environment()
        gpus = 0 if trainer.accelerator == "cpu" else visible_gpus(environ)
        each = trainer.devices if isinstance(trainer.devices, int) else 1
        if "process_devices" in trainer:
            # One process may use all GPUs.
            each = gpus or 1
        number = self.n_jobs or max(1, gpus // each)
        if number == 1 or gpus < 2:
            return number, []
        names = (environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")[:gpus]
        return number, [",".join(names[first : first + each]) for first in range(0, gpus - each + 1, each)]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        number, gpus = self.at_once()
        folder = Path(str(self.config.hydra.sweep.dir)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        program, free = str(Path(sys.argv[0]).resolve()), queue.SimpleQueue[str]()
        for place in range(number):
            free.put(gpus[place % len(gpus)] if gpus else "")
        jobs = []
        for index, words in enumerate(job_overrides, initial_job_idx):
            jobs.append(self.loader.load_sweep_config(self.config, list(words)))
            with open_dict(jobs[-1]):
                jobs[-1].hydra.job.num = index

        def run(cfg: Any) -> JobReturn:
            result = JobReturn(cfg=cfg, status=JobStatus.COMPLETED)
            if sweep.asked:  # by a signal to stop
                return result
            place, path = free.get(), folder / f"{folder.name}_{cfg.hydra.job.num}.log"
            environ = {**environment(), JOBS: str(number)}
            if place:
                environ["CUDA_VISIBLE_DEVICES"] = place
            try:
                with path.open("w") if number > 1 else nullcontext() as output:
                    result.return_value = sweep.run_job(cfg, cfg.hydra, program, environ, output)
            finally:
                free.put(place)  # otherwise the next job waits forever
            return result

        with sweep.forward_stop_signals(), ThreadPoolExecutor(number) as pool:
            return list(map(run, jobs) if number == 1 else pool.map(run, jobs))


class OptunaSearch(Sweeper):
    """Search the ranges of the command line with Optuna's TPE, one job per trial; failed trials are skipped.

    The study is in a journal file, named by the search space: the same command continues it until num_trials have
    finished.

    Args:
        study: name of the study; None: made from the search space, so that another search has another study.
        num_trials: number of finished trials at the end, over all starts.
        direction: maximize or minimize optimized_metric; auto: the mode of the checkpoints.
        folder: of the journal.
        seed: of Optuna's sampler.
    """

    def __init__(self, study: str | None, num_trials: int, direction: str, folder: str, seed: int | None) -> None:
        self.study, self.num_trials, self.seed, self.folder = study, num_trials, seed, Path(folder)

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        try:
            self._search(OverridesParser.create().parse_overrides(arguments))
        except UserError as error:  # Hydra would print a traceback
            log.error(str(error))
            raise SystemExit(EXIT_USER_ERROR) from None

    def _search(self, overrides: list[Override]) -> None:
        from optuna.trial import TrialState

        searched = [override for override in overrides if override.is_sweep_override()]
        if not searched:
            raise UserError("Nothing to search. Pass a range, such as 'optimizer.lr=tag(log,interval(1e-4,1e-1))'.")
        fixed = [f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in overrides if o not in searched]
        study = self._open(sorted(str(override.input_line) for override in searched), sorted(fixed))
        at_once = self.launcher.at_once()[0] if hasattr(self.launcher, "at_once") else 1
        first, limit = len(study.trials), len(study.trials) + 2 * self.num_trials  # at most as many trials may fail
        while (left := self.num_trials - _finished(study)) > 0 and first < limit:
            trials = [study.ask() for _ in range(min(at_once, left))]
            jobs = [[f"{o.get_key_element()}={suggest(trial, o)}" for o in searched] for trial in trials]
            done = self.launcher.launch([(*fixed, *job) for job in jobs], initial_job_idx=first)
            for trial, job, result in zip(trials, jobs, done, strict=True):
                value = float("nan" if result.return_value is None else result.return_value)
                failed = not math.isfinite(value)
                study.tell(trial, *([] if failed else [value]), state=TrialState.FAIL if failed else None)
                log.info(f"trial {trial.number}: {' '.join(job)} → {'failed' if failed else value}")
            first += len(trials)
        if not _finished(study):
            raise UserError(f"No trial of the study {study.study_name} has finished. Their output states the errors.")
        words = " ".join(f"{key}={value}" for key, value in study.best_trial.params.items())
        log.info(f"best of {len(study.trials)} trials: {study.best_trial.value:.6g} with {words}")

    def _open(self, searched: list[str], fixed: list[str]) -> Any:
        """Return the study, new or from its journal; refuse the study of another search."""
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = "minimize" if sweep.is_minimized(self.config) else "maximize"
        search = [direction, str(self.config.optimized_metric), *searched]
        name = self.study or f"search-{hashlib.sha256(chr(10).join([*search, *fixed]).encode()).hexdigest()[:8]}"
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{name}.journal"
        storage = JournalStorage(JournalFileBackend(str(path)))
        study = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
        if (before := study.user_attrs.get("search", search)) != search:
            raise UserError(
                f"The study {name} is another search ({' '.join(before)}): pass hydra.sweeper.study=NAME for a new "
                f"one, or remove {path}."
            )
        study.set_user_attr("search", search)
        log.info(f"study {name} in {path}: {len(study.trials)} trials so far")
        # With the same seed a second start would propose the trials of the first one again.
        study.sampler = optuna.samplers.TPESampler(seed=None if self.seed is None else self.seed + len(study.trials))
        return study


def _finished(study: Any) -> int:
    return sum(trial.value is not None for trial in study.trials)


def suggest(trial: Any, override: Override) -> Any:
    """Return the trial's value for one searched key: of an interval a number in it, else one of the values."""
    key, value = override.get_key_element(), override.value()
    if not isinstance(value, IntervalSweep):
        return trial.suggest_categorical(key, list(override.sweep_string_iterator()))
    start, end = value.start, value.end
    kind = trial.suggest_int if isinstance(start, int) and isinstance(end, int) else trial.suggest_float
    return kind(key, start, end, log="log" in value.tags)
