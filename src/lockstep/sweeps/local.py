"""Run the jobs of a sweep side by side on this machine, each with GPUs of its own."""

import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from lockstep.process.environment import JOBS, environment, visible_gpus
from lockstep.sweeps import jobs as sweep_jobs
from lockstep.sweeps.stopping import asked, forward_stop_signals


def jobs_at_once(trainer: Any, n_jobs: int | None) -> tuple[int, list[str]]:
    """Return the number of jobs at the same time, and the GPUs of each as CUDA_VISIBLE_DEVICES.

    Args:
        trainer: the trainer's options.
        n_jobs: the number that the user asks for; None: one for each GPU, or group of
            `trainer.devices` GPUs.
    """
    environ = environment()
    gpus = 0 if trainer.accelerator == "cpu" else visible_gpus(environ)
    gpus_of_job = trainer.devices if isinstance(trainer.devices, int) else 1
    if "process_devices" in trainer:
        # One process may use all of them.
        gpus_of_job = gpus or 1

    number = n_jobs or max(1, gpus // gpus_of_job)
    if number == 1 or gpus < 2:
        return number, []
    names = list(map(str, range(gpus)))
    if environ.get("CUDA_VISIBLE_DEVICES"):
        names = environ["CUDA_VISIBLE_DEVICES"].split(",")[:gpus]
    starts = range(0, gpus - gpus_of_job + 1, gpus_of_job)
    return number, [",".join(names[start : start + gpus_of_job]) for start in starts]


def run_side_by_side(
    jobs: Sequence[Any], folder: Path, program: str, number: int, gpus: list[str]
) -> list[JobReturn]:
    """Run jobs in child processes; return how each has ended, in order.

    Args:
        jobs: their composed configs, with Hydra's node.
        folder: of the sweep; with several jobs at a time each prints into a file there.
        program: path of the script that started the sweep.
        number, gpus: as from `jobs_at_once`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for place in range(number):
        free.put(gpus[place % len(gpus)] if gpus else "")

    def run(cfg: Any) -> JobReturn:
        result = JobReturn(cfg=cfg, status=JobStatus.COMPLETED)
        if asked:
            # A signal asked the sweep to stop.
            return result

        devices = free.get()
        environ = {**environment(), JOBS: str(number)}
        if devices:
            environ["CUDA_VISIBLE_DEVICES"] = devices
        path = folder / f"{folder.name}_{cfg.hydra.job.num}.log"
        try:
            with path.open("w") if number > 1 else nullcontext() as output:
                result.return_value = sweep_jobs.run_job(cfg, cfg.hydra, program, environ, output)
        finally:
            # Otherwise the next job would wait for ever.
            free.put(devices)
        return result

    with forward_stop_signals(), ThreadPoolExecutor(number) as pool:
        if number == 1:
            return [run(job) for job in jobs]
        return list(pool.map(run, jobs))
