"""Use and memory of every node's GPUs and CPUs in training: a CSV file per node, medians and maxima in the record.

One thread in local rank 0 of each node reads psutil and torch.cuda's own readings (NVML). It starts no CUDA work.
"""

import csv
import logging
import os
import resource
import socket
import subprocess
import threading
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import psutil
import torch

from lockstep.ranks.collectives import gather_objects
from lockstep.runs.environment import cpu_name
from lockstep.runs.errors import Interrupted
from lockstep.runs.files import utc_now

log = logging.getLogger(__name__)

GIB = 2**30
MEANS = {"gpu_percent": ("gpu", "/utilisation_percent"), "gpu_memory_gib": ("gpu", "/memory_gib"),
         "cpu_percent": ("cpu", "/percent")}  # fmt: skip


class HardwareStats(pl.Callback):
    """Sample every `interval_s` seconds into `run_folder`, or into the trainer's default_root_dir."""

    def __init__(self, run_folder: str | Path | None = None, interval_s: float = 1.0) -> None:
        self.run_folder, self.interval_s = run_folder, interval_s
        self.values: dict[str, array[float]] = {}  # by the column of the file
        self.shown, self.is_host_bound = 0, False  # samples that a log point has had; as was logged
        self.fields: dict[str, object] = {}  # of the record, once training has ended
        self.devices, self.gpus, self.memory = set[torch.device](), list[int](), 0.0  # until fit starts
        self.finished, self.thread = threading.Event(), threading.Thread()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.node_rank, self.memory = trainer.node_rank, psutil.virtual_memory().total / trainer.num_devices
        several = getattr(trainer.strategy, "process_devices", None)  # of a process that computes on several
        self.devices = {device for device in several or [trainer.strategy.root_device] if device.type == "cuda"}
        if self.devices:
            of_process = sorted(device.index or 0 for device in self.devices)
            self.gpus = of_process if several else list(range(trainer.num_devices))  # one of each rank
        ranks = gather_objects((trainer.node_rank, trainer.global_rank, os.getpid()))
        if trainer.local_rank == 0:
            queries = queries_of(self.gpus, {rank: pid for node, rank, pid in ranks if node == self.node_rank})
            path = Path(self.run_folder or trainer.default_root_dir) / f"hardware-node{self.node_rank}.csv"
            self.thread = threading.Thread(target=self._sample, args=(path, queries), daemon=True)
            self.thread.start()

    def latest_means(self) -> dict[str, float]:
        """Return the mean over this node's devices since the last log point, for the loggers."""
        values, begin, found = dict(self.values), self.shown, {}
        self.shown = max(map(len, values.values()), default=0)
        for title, (first, last) in MEANS.items():
            series = [each[begin:] for name, each in values.items() if name.startswith(first) and name.endswith(last)]
            if samples := [sample for each in series for sample in each]:
                found[f"hardware/{title}"] = round(float(np.mean(samples)), 3)
        return found

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log once that a GPU of this node waits for the host."""
        used = [
            float(np.median(v[:])) for name, v in dict(self.values).items() if name.endswith("/utilisation_percent")
        ]
        enough = max(map(len, self.values.values()), default=0) > 30
        if used and enough and min(used) < 60 and not self.is_host_bound and trainer.is_global_zero:
            self.is_host_bound = True
            log.info(
                f"A GPU is busy {min(used):.0f} % of the time: steps wait for the host. Raise data.global_batch_size, "
                "set 'trainer.compile={mode: reduce-overhead}', or raise data.num_workers where images are loaded."
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(all_ranks=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end(all_ranks=isinstance(exception, Interrupted) and exception.agreed)

    def _end(self, all_ranks: bool) -> None:
        """Stop sampling, and collect the statistics of all nodes if all ranks call this."""
        self.finished.set()
        if self.thread.is_alive():
            self.thread.join(timeout=25)
        peak = max(map(torch.cuda.max_memory_reserved, self.devices), default=0)
        peak = peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        usable = self.memory  # after an error of the device it cannot be asked
        if all_ranks and self.devices:
            usable = min(torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) for gpu in self.devices)
        node = self._node() if self.values else None
        if node and self.gpus:
            try:
                node["nvidia_smi"] = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20).stdout
            except (OSError, subprocess.TimeoutExpired) as error:
                node["nvidia_smi"] = str(error)
        found = gather_objects((peak, usable, node)) if all_ranks else [(peak, usable, node)]
        nodes = [node for _, _, node in found if node]
        self.fields = {
            "peak_memory_gib": round(max(peak for peak, _, _ in found) / GIB, 4),  # the largest of all ranks
            "usable_memory_gib": round(min(usable for _, usable, _ in found) / GIB, 4),  # of a device, by its process
            "hardware": {"nodes": nodes} if nodes else {},
        }

    def record_fields(self) -> dict[str, object]:
        """Return this node's statistics so far, or those of all nodes once training has ended."""
        return self.fields or ({"hardware": {"nodes": [self._node()]}} if self.values else {})

    def _sample(self, path: Path, queries: dict[str, Callable[[], float]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():  # of an earlier start of the run
            path.rename(path.with_suffix(f".{len(list(path.parent.glob(f'{path.stem}.*.csv')))}.csv"))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["time", *queries])
            writer.writeheader()
            while not self.finished.wait(self.interval_s if self.values else 0):
                row: dict[str, Any] = {"time": utc_now()}
                for name, query in list(queries.items()):
                    try:
                        row[name] = round(float(query()), 4)
                        self.values.setdefault(name, array("f")).append(row[name])
                    except Exception as error:  # NVML and psutil raise errors of their own; none may end a run
                        log.info(f"hardware: {name} is no longer sampled ({type(error).__name__}: {error})")
                        del queries[name]
                writer.writerow(row)
                file.flush()

    def _node(self) -> dict[str, Any]:
        gpus = map(torch.cuda.get_device_properties, self.gpus)
        return {
            "node_rank": self.node_rank, "host": socket.gethostname(), "cpu": cpu_name(), "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / GIB, 2),
            "gpus": [{"name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 2)} for gpu in gpus],
            "stats": {name: {"p50": float(np.median(v[:])), "max": max(v)} for name, v in list(self.values.items())},
        }  # fmt: skip


def queries_of(gpus: list[int], processes: dict[int, int]) -> dict[str, Callable[[], float]]:
    """Return the functions that read each value, by its name; `processes` holds the process id of each rank."""
    psutil.cpu_percent()  # the first call has nothing to compare with and returns 0
    queries: dict[str, Any] = {"cpu/percent": psutil.cpu_percent}
    queries["machine/memory_gib"] = lambda: psutil.virtual_memory().used / GIB
    for rank, process in ((rank, psutil.Process(pid)) for rank, pid in processes.items()):
        queries[f"rank{rank}/memory_gib"] = lambda process=process: process.memory_info().rss / GIB
    for gpu in gpus:
        queries[f"gpu{gpu}/utilisation_percent"] = partial(torch.cuda.utilization, gpu)
        queries[f"gpu{gpu}/memory_gib"] = lambda gpu=gpu: torch.cuda.device_memory_used(gpu) / GIB
        queries[f"gpu{gpu}/power_w"] = lambda gpu=gpu: torch.cuda.power_draw(gpu) / 1000
        queries[f"gpu{gpu}/temperature_c"] = partial(torch.cuda.temperature, gpu)
    return queries
