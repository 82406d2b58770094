"""Hydra plugins for -m: jobs side by side on this machine, and a search of ranges with Optuna.

    python src/train.py -m experiment=quickstart optimizer.lr=1e-3,1e-2 seed=1,2
    python src/train.py -m experiment=quickstart hydra/sweeper=optuna hydra.sweeper.num_trials=30 \\
      'optimizer.lr=tag(log,interval(1e-4,1e-1))' 'task.label_smoothing=choice(0.0,0.1)'

Hydra finds its plugins here; what they do is in lockstep/sweeps. Hydra imports this file at every
start, so that it imports what a sweep needs when a sweep begins.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lockstep.config.keys import DEVICE_KEYS
from lockstep.config.schema import key_of
from lockstep.process.errors import EXIT_USER_ERROR, UserError
from lockstep.records.trial import check_pruner

if TYPE_CHECKING:
    from lockstep.sweeps.local import StartJob

log = logging.getLogger(__name__)


class LocalJobs(Launcher):
    """Run each job in a child process.

    Args:
        n_jobs: number of jobs at the same time; None: one for each GPU (or group of
            `trainer.devices` GPUs), one on a CPU. With 1 a job sees all GPUs.
    """

    def __init__(self, n_jobs: int | None = None) -> None:
        self.n_jobs = n_jobs
        # An option that gives jobs other numbers of GPUs, if one varies.
        self.swept_devices = ""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.loader = hydra_context.config_loader
        self.config = config

    def plan_jobs(self) -> tuple[int, list[str]]:
        """Return the number of jobs at the same time, and the GPUs of each."""
        from lockstep.sweeps.local import plan_jobs

        number, gpus = plan_jobs(self.config.trainer, self.n_jobs)
        if self.swept_devices and number > 1 and self.n_jobs is None:
            log.info(
                f"{self.swept_devices} varies, so the jobs run one at a time and each sees all "
                "GPUs (hydra.launcher.n_jobs= changes that)."
            )
            return 1, []
        return number, gpus

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        self._refuse_other_jobs(job_overrides, initial_job_idx)
        texts = [set(overrides) for overrides in job_overrides]
        for override in set().union(*texts) - texts[0].intersection(*texts):
            if key_of(override) in DEVICE_KEYS:
                self.swept_devices = key_of(override)
        with self.job_starter() as start:
            futures = []
            for number, overrides in enumerate(job_overrides, initial_job_idx):
                futures.append(start(overrides, number))
            return [future.result() for future in futures]

    def _refuse_other_jobs(self, job_overrides: Sequence[Sequence[str]], first: int) -> None:
        """End the sweep before its first job if the folder of a job holds another job's run."""
        from lockstep.sweeps.checks import refuse_other_job
        from lockstep.sweeps.jobs import folder_of_job, overrides_of_job

        sweep_dir = Path(str(self.config.hydra.sweep.dir)).resolve()
        try:
            for number, overrides in enumerate(job_overrides, first):
                refuse_other_job(folder_of_job(sweep_dir, number), overrides_of_job(overrides))
        except UserError as error:
            # Hydra would print a traceback.
            log.error(str(error))
            raise SystemExit(EXIT_USER_ERROR) from None

    @contextmanager
    def job_starter(self) -> "Iterator[StartJob]":
        """Yield a function that starts a job; the block ends when all jobs have ended."""
        from lockstep.sweeps.local import open_job_pool

        folder = Path(str(self.config.hydra.sweep.dir)).resolve()
        program = str(Path(sys.argv[0]).resolve())
        num_parallel, gpus = self.plan_jobs()
        with open_job_pool(folder, program, num_parallel, gpus) as start:
            yield lambda overrides, number: start(self._compose_job(overrides, number))

    def _compose_job(self, overrides: Sequence[str], number: int) -> DictConfig:
        """Return a job's composed config, with Hydra's node."""
        job = self.loader.load_sweep_config(self.config, list(overrides))
        with open_dict(job):
            job.hydra.job.num = number
        return job


class OptunaSearch(Sweeper):
    """Search the ranges of the command line with Optuna's TPE, one job per trial.

    Failed trials are skipped. The study is in a journal file, named by the search space: the same
    command continues it, and the trials that were stopped, until num_trials have ended.

    Args:
        study: name of the study; None derives it from the search space, so that another search
            has another study.
        num_trials: number of finished and pruned trials at the end, over all starts.
        pruner: hyperband or median, which end hopeless trials after a validation; None ends none.
        direction: maximize or minimize optimized_metric; auto: the mode of the checkpoints. Hydra
            passes it as every option of its yaml, and `ranking.is_minimized` reads it there.
        folder: the folder of the journal.
        seed: the seed of Optuna's sampler.
    """

    def __init__(
        self,
        study: str | None,
        num_trials: int,
        direction: str,
        folder: str,
        seed: int | None,
        pruner: str | None = None,
    ) -> None:
        self.study = study
        self.num_trials = num_trials
        self.pruner = pruner
        self.folder = Path(folder)
        self.seed = seed

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config = config
        self.loader = hydra_context.config_loader
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from lockstep.sweeps.search import Search

        try:
            check_pruner(self.pruner)
            # A glob needs the loader, which knows the options.
            parser = OverridesParser.create(config_loader=self.loader)
            overrides = parser.parse_overrides(arguments)
            search = Search(overrides, self.config, self.study, self.folder, self.seed, self.pruner)
            with self._job_starter() as start:
                search.run(self.num_trials, self._count_parallel_jobs(), start)
            search.report()
        except UserError as error:
            # Hydra would print a traceback.
            log.error(str(error))
            raise SystemExit(EXIT_USER_ERROR) from None

    def _count_parallel_jobs(self) -> int:
        if isinstance(self.launcher, LocalJobs):
            number, _ = self.launcher.plan_jobs()
            return number
        return 1

    def _job_starter(self) -> "AbstractContextManager[StartJob]":
        """Yield a function that starts a job. With other launchers it waits for the job's end."""
        if isinstance(self.launcher, LocalJobs):
            return self.launcher.job_starter()
        return nullcontext(self._launch)

    def _launch(self, overrides: Sequence[str], number: int) -> Future[JobReturn]:
        future: Future[JobReturn] = Future()
        future.set_result(self.launcher.launch([list(overrides)], number)[0])
        return future
