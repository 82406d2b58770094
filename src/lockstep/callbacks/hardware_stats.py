"""Sample use and memory of every node's GPUs and CPUs in training, into a CSV file for each node.

The record gets the median and the maximum of each reading. On each node, a thread of local rank 0
reads psutil, and NVML through torch.cuda. The thread starts no CUDA work. Statistics take constant
time and memory, however long the run is.
"""

import csv
import logging
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch

from lockstep.callbacks.distribution import Distribution
from lockstep.process.environment import available_cores, available_memory, cpu_name
from lockstep.process.errors import Interrupted
from lockstep.process.files import utc_now
from lockstep.ranks.collectives import gather_objects

log = logging.getLogger(__name__)

GIB = 2**30
# Each column of metrics.csv is a mean over readings. The pair says how the names of the readings
# begin and end: gpu_memory_gib is the mean over gpu0/memory_gib and gpu1/memory_gib.
MEAN_COLUMNS = {
    "gpu_percent": ("gpu", "/utilisation_percent"),
    "gpu_memory_gib": ("gpu", "/memory_gib"),
    "cpu_percent": ("cpu", "/percent"),
}
# Fewer samples do not show that a GPU waits for the host.
ENOUGH_SAMPLES = 30
BUSY_PERCENT = 60
Query = Callable[[], float]


class Samples:
    """The distribution of each reading, and its sum since the last log point.

    One thread adds samples while another one reads.
    """

    def __init__(self) -> None:
        self.distributions: dict[str, Distribution] = {}  # by the column of the file
        self.recent: dict[str, tuple[int, float]] = {}  # number and sum since the last log point
        self.lock = threading.Lock()

    def add(self, name: str, value: float) -> None:
        with self.lock:
            if name not in self.distributions:
                self.distributions[name] = Distribution()
            self.distributions[name].add(value)
            count, total = self.recent.get(name, (0, 0.0))
            self.recent[name] = (count + 1, total + value)

    def pop_means(self) -> dict[str, float]:
        """Return the means of MEAN_COLUMNS over this node's devices since the last call."""
        with self.lock:
            recent = self.recent
            self.recent = {}
        means = {}
        for title, (beginning, ending) in MEAN_COLUMNS.items():
            count = 0
            total = 0.0
            for name in recent:
                if name.startswith(beginning) and name.endswith(ending):
                    count += recent[name][0]
                    total += recent[name][1]
            if count:
                means[title] = round(total / count, 3)
        return means

    def statistics(self) -> dict[str, dict[str, float]]:
        """Return the median and the maximum of each reading."""
        with self.lock:
            return {
                name: {"p50": round(values.quantile(0.5), 4), "max": values.maximum}
                for name, values in self.distributions.items()
            }

    def lowest_gpu_percent(self) -> float | None:
        """Return the median use of the least busy GPU; None without GPUs or with few samples."""
        with self.lock:
            gpus = [
                values
                for name, values in self.distributions.items()
                if name.endswith("/utilisation_percent")
            ]
            if not gpus or gpus[0].count <= ENOUGH_SAMPLES:
                return None
            return min(values.quantile(0.5) for values in gpus)


class HardwareStats(pl.Callback):
    """Sample use and memory of the devices, and write them into a file for each node.

    Args:
        run_folder: the folder of the files; None: the trainer's default_root_dir.
        interval_s: seconds between two samples.
    """

    def __init__(
        self,
        run_folder: str | Path | None = None,
        interval_s: float = 1.0,
    ) -> None:
        self.run_folder = run_folder
        self.interval_s = interval_s
        self.samples = Samples()
        self.has_begun = False  # whether training has started
        self.has_logged_host_bound = False
        self.final_fields: dict[str, object] = {}  # of the record, once training has ended
        self.process_gpus: set[torch.device] = set()
        self.node_gpus: list[int] = []  # indices
        self.host_bytes_per_rank = 0.0
        self.finished = threading.Event()
        self.thread = threading.Thread()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.node_rank = trainer.node_rank
        self.has_begun = True
        self.host_bytes_per_rank = total_memory() / trainer.num_devices
        # A process of DataParallel or of a pipeline computes on several devices.
        process_devices = getattr(trainer.strategy, "process_devices", None)
        devices = process_devices or [trainer.strategy.root_device]
        self.process_gpus = {device for device in devices if device.type == "cuda"}
        gpus_of_rank = {device.index or 0 for device in self.process_gpus}
        ranks = gather_objects((trainer.node_rank, trainer.global_rank, os.getpid(), gpus_of_rank))
        if trainer.local_rank != 0:
            return
        processes = {}
        gpus: set[int] = set()
        for node_rank, rank, pid, gpus_of_rank in ranks:
            if node_rank == self.node_rank:
                processes[rank] = pid
                gpus |= gpus_of_rank
        self.node_gpus = sorted(gpus)
        folder = Path(self.run_folder or trainer.default_root_dir)
        path = folder / f"hardware-node{self.node_rank}.csv"
        queries = make_queries(self.node_gpus, processes)
        self.finished.clear()
        self.thread = threading.Thread(target=self._sample, args=(path, queries), daemon=True)
        self.thread.start()

    def latest_means(self) -> dict[str, float]:
        """Return the means over this node's devices since the last log point, for the loggers."""
        means = self.samples.pop_means()
        return {f"hardware/{title}": mean for title, mean in means.items()}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log once that a GPU of this node waits for the host."""
        if self.has_logged_host_bound or not trainer.is_global_zero:
            return
        percent = self.samples.lowest_gpu_percent()
        if percent is not None and percent < BUSY_PERCENT:
            self.has_logged_host_bound = True
            log.info(
                f"A GPU is busy {percent:.0f} % of the time: steps wait for the host. Raise "
                "data.global_batch_size, set 'trainer.compile={mode: reduce-overhead}', or raise "
                "data.num_workers where images are loaded."
            )

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop_sampling()
        self._gather_final_fields()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Stop sampling, and gather what the record gets if all ranks stop together.

        After an error the other ranks may not come, and a device may no longer answer.
        """
        self._stop_sampling()
        if isinstance(exception, Interrupted) and exception.is_agreed:
            self._gather_final_fields()

    def _stop_sampling(self) -> None:
        self.finished.set()
        if self.thread.is_alive():
            self.thread.join(timeout=25)

    def _gather_final_fields(self) -> None:
        """Gather the statistics of all nodes; every rank calls this."""
        if not self.has_begun:
            return
        rank_fields = (self._peak_bytes(), self._usable_bytes(), self._final_node_fields())
        peaks, usable, node_fields = zip(*gather_objects(rank_fields), strict=True)
        nodes = [node for node in node_fields if node]
        self.final_fields = {
            "peak_memory_gib": round(max(peaks) / GIB, 4),
            "usable_memory_gib": round(min(usable) / GIB, 4),
            "hardware": {"nodes": nodes} if nodes else {},
        }

    def _peak_bytes(self) -> int:
        """Return the most bytes that this process has held, on its GPUs if it has any."""
        peak = max(map(torch.cuda.max_memory_reserved, self.process_gpus), default=0)
        return peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def _usable_bytes(self) -> float:
        """Return the bytes that this process can use of its smallest GPU, or of the host."""
        free = (
            torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu)
            for gpu in self.process_gpus
        )
        return min(free, default=self.host_bytes_per_rank)

    def _final_node_fields(self) -> dict[str, Any] | None:
        """Return what the record says of this node; None on ranks that have sampled nothing."""
        if not self.samples.distributions:
            return None
        node = self._node_fields()
        if self.node_gpus:
            node["nvidia_smi"] = nvidia_smi()
        return node

    def record_fields(self) -> dict[str, object]:
        """Return this node's statistics so far; once training has ended, those of all nodes."""
        if self.final_fields:
            return self.final_fields
        if self.samples.distributions:
            return {"hardware": {"nodes": [self._node_fields()]}}
        return {}

    def _sample(self, path: Path, queries: dict[str, Query]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rename_earlier_file(path)
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["time", *queries])
            writer.writeheader()
            is_first = True
            while is_first or not self.finished.wait(self.interval_s):
                is_first = False
                values = run_queries(queries)
                for name, value in values.items():
                    self.samples.add(name, value)
                writer.writerow({"time": utc_now(), **values})
                file.flush()

    def _node_fields(self) -> dict[str, Any]:
        gpus = map(torch.cuda.get_device_properties, self.node_gpus)
        return {
            "node_rank": self.node_rank,
            "host": socket.gethostname(),
            "cpu": cpu_name(),
            "cores": available_cores(),
            "memory_gib": round(total_memory() / GIB, 2),
            "gpus": [
                {"name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 2)} for gpu in gpus
            ],
            "stats": self.samples.statistics(),
        }


def total_memory() -> int:
    """Return the bytes of memory that the processes of this node may use."""
    return available_memory(psutil.virtual_memory().total)


def rename_earlier_file(path: Path) -> None:
    """Rename the file of an earlier start of the run to <name>.0.csv, <name>.1.csv and so on."""
    if path.exists():
        earlier = list(path.parent.glob(f"{path.stem}.*.csv"))
        number = len(earlier)
        path.rename(path.with_suffix(f".{number}.csv"))


def run_queries(queries: dict[str, Query]) -> dict[str, float]:
    """Return the value of each query, and remove the queries that fail from `queries`."""
    values = {}
    for name, query in list(queries.items()):
        try:
            values[name] = round(float(query()), 4)
        # NVML and psutil raise errors of their own classes.
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            log.info(f"hardware: {name} is no longer sampled ({message})")
            del queries[name]
    return values


def nvidia_smi() -> str:
    """Return what nvidia-smi prints, or why it prints nothing."""
    try:
        completed = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return completed.stdout


def make_queries(gpus: list[int], processes: dict[int, int]) -> dict[str, Query]:
    """Return the functions that read each value, by its name.

    Args:
        gpus: indices of this node's GPUs.
        processes: the process id of each rank of this node.
    """
    # The first call has nothing to compare with and returns 0.
    psutil.cpu_percent()
    queries: dict[str, Query] = {
        "cpu/percent": psutil.cpu_percent,
        "machine/memory_gib": lambda: psutil.virtual_memory().used / GIB,
    }
    for rank, pid in processes.items():
        queries[f"rank{rank}/memory_gib"] = partial(memory_gib, psutil.Process(pid))
    for gpu in gpus:
        queries |= {
            f"gpu{gpu}/utilisation_percent": partial(torch.cuda.utilization, gpu),
            f"gpu{gpu}/memory_gib": partial(gpu_memory_gib, gpu),
            f"gpu{gpu}/power_w": partial(gpu_power_w, gpu),
            f"gpu{gpu}/temperature_c": partial(torch.cuda.temperature, gpu),
        }
    return queries


def memory_gib(process: psutil.Process) -> float:
    return process.memory_info().rss / GIB


def gpu_memory_gib(gpu: int) -> float:
    return torch.cuda.device_memory_used(gpu) / GIB


def gpu_power_w(gpu: int) -> float:
    return torch.cuda.power_draw(gpu) / 1000
