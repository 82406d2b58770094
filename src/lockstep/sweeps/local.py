"""Run the jobs of a sweep side by side on this machine, each with GPUs of its own."""

import queue
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from lockstep.process.environment import JOBS, count_visible_gpus, environment
from lockstep.sweeps import jobs as sweep_jobs
from lockstep.sweeps.stopping import forward_stop_signals, stop_signals

# Starts a job, given its overrides and its number.
StartJob = Callable[[Sequence[str], int], Future[JobReturn]]


def plan_jobs(trainer: Any, n_jobs: int | None) -> tuple[int, list[str]]:
    """Return the number of jobs at the same time, and the GPUs of each as CUDA_VISIBLE_DEVICES.

    Args:
        trainer: the trainer's options.
        n_jobs: the number that the user asks for; None: one for each GPU, or group of
            `trainer.devices` GPUs.
    """
    environ = environment()
    num_gpus = 0 if trainer.accelerator == "cpu" else count_visible_gpus(environ)
    gpus_per_job = trainer.devices if isinstance(trainer.devices, int) else 1
    if "process_devices" in trainer and trainer.launch == "one_process":
        # One process may use all GPUs.
        gpus_per_job = num_gpus or 1

    num_parallel = n_jobs or max(1, num_gpus // gpus_per_job)
    if num_parallel == 1 or num_gpus < 2:
        return num_parallel, []
    gpu_ids = list(map(str, range(num_gpus)))
    if environ.get("CUDA_VISIBLE_DEVICES"):
        gpu_ids = environ["CUDA_VISIBLE_DEVICES"].split(",")[:num_gpus]
    starts = range(0, num_gpus - gpus_per_job + 1, gpus_per_job)
    return num_parallel, [",".join(gpu_ids[start : start + gpus_per_job]) for start in starts]


@contextmanager
def open_job_pool(
    folder: Path, program: str, num_parallel: int, gpus: list[str]
) -> Iterator[Callable[[Any], Future[JobReturn]]]:
    """Yield a function that starts a job in a child process as soon as its GPUs are free.

    It takes the job's composed config, with Hydra's node. The block ends when all jobs have ended.

    Args:
        folder: the folder of the sweep. If several jobs run at a time, each prints into a file
            there.
        program: path of the script that started the sweep.
        num_parallel, gpus: as `plan_jobs` returns them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free_gpus: queue.SimpleQueue[str] = queue.SimpleQueue()
    for slot in range(num_parallel):
        free_gpus.put(gpus[slot % len(gpus)] if gpus else "")

    def run(cfg: Any) -> JobReturn:
        result = JobReturn(cfg=cfg, status=JobStatus.COMPLETED)
        if stop_signals:
            # A signal asked the sweep to stop.
            return result

        gpus_of_job = free_gpus.get()
        environ = {**environment(), JOBS: str(num_parallel)}
        if gpus_of_job:
            environ["CUDA_VISIBLE_DEVICES"] = gpus_of_job
        path = folder / f"{folder.name}_{cfg.hydra.job.num}.log"
        try:
            with path.open("w") if num_parallel > 1 else nullcontext() as output:
                result.return_value = sweep_jobs.run_job(cfg, cfg.hydra, program, environ, output)
        finally:
            # Otherwise the next job would wait for ever.
            free_gpus.put(gpus_of_job)
        return result

    with forward_stop_signals(), ThreadPoolExecutor(num_parallel) as pool:
        yield lambda cfg: pool.submit(run, cfg)
