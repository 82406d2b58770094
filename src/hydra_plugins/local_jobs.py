"""Hydra launcher that runs the jobs of a sweep on this machine, one for each GPU side by side."""

import logging
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from lockstep.commands import sweep
from lockstep.runs.environment import environment, visible_gpus

log = logging.getLogger(__name__)


class LocalJobs(Launcher):
    """Run each job in a child process.

    Args:
        n_jobs: jobs at the same time; None: one for each GPU (or group of `trainer.devices` GPUs), one on a CPU. With 1
            a job sees all GPUs.
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
        number = self.n_jobs or max(1, gpus // each)
        if number == 1 or gpus < 2:
            return number, []
        names = (environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")[:gpus]
        return number, [",".join(names[first : first + each]) for first in range(0, gpus - each + 1, each)]

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        number, gpus = self.at_once()
        folder = Path(str(self.config.hydra.sweep.dir)).resolve()  # the jobs' configs inherit its random name
        folder.mkdir(parents=True, exist_ok=True)
        program, free = str(Path(sys.argv[0]).resolve()), queue.SimpleQueue[str]()
        for place in range(number):
            free.put(gpus[place % len(gpus)] if gpus else "")
        jobs, started = [], []
        for index, words in enumerate(job_overrides, initial_job_idx):
            jobs.append(self.loader.load_sweep_config(self.config, list(words)))
            with open_dict(jobs[-1]):
                jobs[-1].hydra.job.num = index

        def run(cfg: Any) -> JobReturn:
            result = JobReturn(cfg=cfg, status=JobStatus.COMPLETED)
            if sweep.asked:  # to stop
                return result
            started.append(cfg)
            if number == 1:
                result.return_value = sweep.run_job(cfg, cfg.hydra, program)
                return result
            place, path = free.get(), folder / f"{folder.name}_{cfg.hydra.job.num}.log"
            environ: dict[str, Any] = {**environment(), **({"CUDA_VISIBLE_DEVICES": place} if place else {})}
            with path.open("w") as output:
                result.return_value = sweep.run_job(cfg, cfg.hydra, program, environ, output)
            free.put(place)
            log.info(f"job {cfg.hydra.job.num} has ended: {path}")
            return result

        try:
            with sweep.forward_stop_signals(), ThreadPoolExecutor(number) as pool:
                return list(map(run, jobs) if number == 1 else pool.map(run, jobs))
        finally:
            if left := len(jobs) - len(started):
                log.info(f"{left} of {len(jobs)} jobs were not started.")
