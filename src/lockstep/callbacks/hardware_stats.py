"""Samples GPUs and CPUs of every node while the run trains: a CSV per node, percentiles in the record, TensorBoard.

One thread in local rank 0 of each node; it never touches a CUDA context and never ends a run. What the other nodes
have goes to node 0 at each epoch's end and at a stop.
"""

import csv
import importlib
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import lightning.pytorch as pl
import torch

from lockstep.callbacks import hardware_readings as machine_readings
from lockstep.callbacks.hardware_readings import CpuReader, GpuReader, Reading
from lockstep.callbacks.node_files import Receiver, Sender, set_earlier_aside, share_folder
from lockstep.callbacks.percentiles import KeptSamples
from lockstep.distributed.json_collectives import broadcast_json, gather_json
from lockstep.runs.config import Config
from lockstep.runs.csv_files import guarded
from lockstep.runs.errors import Interrupted
from lockstep.runs.files import utc_now
from lockstep.runs.folder import RunFolder
from lockstep.runs.hooks import ComputesOnSeveral
from lockstep.runs.typed_json import WrongValue

PEAK_GROWTH = 1.05  # nvidia-smi is asked again when memory has grown by this factor
PEAK_INTERVAL_S = 10.0
DENSE_SAMPLES = 7200  # of a start; later ones come further apart, so that days of a large node stay some tens of MB


class Sampler(threading.Thread):
    """Reads every `interval_s` (in long runs less often), writes a CSV row, keeps what percentiles need.

    Args:
        read: returns one reading; an exception is named once and the row left out.
        on_reading: called in the thread with each reading.
    """

    def __init__(self, read: Callable[[], Reading], path: Path, interval_s: float, on_reading=None) -> None:
        super().__init__(name="hardware-stats", daemon=True)
        self.read, self.path, self.interval_s, self.on_reading = read, path, interval_s, on_reading
        self.values: dict[str, KeptSamples] = {}
        self.last: Reading = {}
        self.throttled: set[str] = set()
        self.seconds_busy = 0.0
        self.finished = threading.Event()
        self._told = False

    def run(self) -> None:
        began = time.perf_counter()
        set_earlier_aside(self.path)
        with self.path.open("w", newline="") as file:
            writer: csv.DictWriter | None = None
            while True:
                started = time.perf_counter()
                writer = self._sample(writer, file)
                busy = time.perf_counter() - started
                self.seconds_busy += busy
                if self.finished.wait(max(pause_s(self.interval_s, started - began) - busy, 0.01)):
                    return

    def stop(self) -> None:
        self.finished.set()
        if self.is_alive():
            self.join(timeout=25)

    def summary(self) -> dict[str, dict[str, float]]:
        """{name: {p10, p50, p90, max}} of what was read so far."""
        return {name: stats for name, values in list(self.values.items()) if (stats := values.summary())}

    def _sample(self, writer: csv.DictWriter | None, file: Any) -> csv.DictWriter | None:
        try:
            reading = self.read()
            if writer is None:
                writer = csv.DictWriter(file, ["time", *reading], extrasaction="ignore")
                writer.writeheader()
            writer.writerow({"time": utc_now(), **{name: _cell(value) for name, value in reading.items()}})
            file.flush()
            self._keep(reading)
            if self.on_reading is not None:
                self.on_reading(reading)
        except Exception as error:  # a reading is never worth a run
            if not self._told:
                self._told = True
                machine_readings.say(f"readings are left out ({type(error).__name__}: {error}); training goes on")
        return writer

    def _keep(self, reading: Reading) -> None:
        self.last = reading
        for name, value in reading.items():
            if isinstance(value, str):
                self.throttled.update(f"{name.split('/')[0]}:{word}" for word in value.split("|") if word)
            elif value is not None:
                if name not in self.values:
                    self.values[name] = KeptSamples()
                self.values[name].add(value)


def pause_s(interval_s: float, age_s: float) -> float:
    """Between two samples: in proportion to the age of the file once it holds DENSE_SAMPLES."""
    return max(interval_s, age_s / DENSE_SAMPLES)


def _cell(value: float | str | None) -> Any:
    return round(value, 4) if isinstance(value, float) else guarded(value)


def gpus_in_use(trainer: pl.Trainer) -> set[int]:
    """Of the GPUs that this node's processes see those that they compute on, by position."""
    strategy: Any = trainer.strategy
    if isinstance(strategy, ComputesOnSeveral):
        return {device.index or 0 for device in strategy.process_devices if device.type == "cuda"}
    return set(range(trainer.num_devices)) if strategy.root_device.type == "cuda" else set()


class HardwareStats(pl.Callback):
    """Hardware statistics of every node.

    Args:
        run_folder: where the files go; the trainer's default_root_dir where none is given.
        interval_s: seconds between samples.
        tensorboard_interval_s: seconds between scalars in TensorBoard.
        visible_devices: CUDA_VISIBLE_DEVICES of the ranks; None: unset.
        nvml, psutil: stand-ins for the libraries.
        nvidia_smi: returns the program's text, or None.
    """

    def __init__(
        self,
        run_folder: str | Path | None = None,
        interval_s: float = 1.0,
        tensorboard_interval_s: float = 10.0,
        visible_devices: str | None = None,
        nvml: Any = None,
        psutil: Any = None,
        nvidia_smi: Callable[[], str | None] = machine_readings.nvidia_smi,
    ) -> None:
        self.run_folder = run_folder
        self.interval_s, self.tensorboard_interval_s = interval_s, tensorboard_interval_s
        self.visible_devices, self.nvml, self.psutil, self.nvidia_smi = visible_devices, nvml, psutil, nvidia_smi
        self.sampler: Sampler | None = None
        self.gpus: GpuReader | None = None
        self.other_nodes: dict[int, Config] = {}
        self.sender: Sender | None = None
        self.receivers: dict[int, Receiver] = {}  # on rank 0, by node
        self.node_rank = 0
        self.smi_peak_gib, self.smi_asked_at = 0.0, 0.0
        self.logged_at = 0.0

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.node_rank = trainer.node_rank
        self.folder = RunFolder(Path(self.run_folder or trainer.default_root_dir))
        processes = self._rank_processes(trainer)
        shares_folder = trainer.num_nodes == 1 or share_folder(self.folder.path, trainer.is_global_zero)
        if trainer.local_rank != 0:
            return
        if self.node_rank:
            self.sender = Sender(self.folder, self.node_rank, shares_folder)
        psutil = self.psutil or importlib.import_module("psutil")
        used = gpus_in_use(trainer)
        nvml = self.nvml or (machine_readings.nvml_library() if used and torch.cuda.is_available() else None)
        self.gpus = GpuReader(nvml, self.visible_devices)
        if not self.nvml:  # others may work on the rest
            self.gpus.gpus = [gpu for gpu in self.gpus.gpus if gpu.index in used]
        self.cpus = CpuReader(processes, psutil)
        self.facts = self._facts(psutil)
        path = self.folder.hardware_samples(self.node_rank)
        self.sampler = Sampler(self._read, path, self.interval_s, self._watch_memory)
        self._write_smi("start")
        self.sampler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module, outputs, batch, batch_idx: int) -> None:
        now = time.monotonic()
        if self.sampler is None or now < self.logged_at + self.tensorboard_interval_s:
            return
        self.logged_at = now
        read = list(self.sampler.last.items())
        scalars = {name: value for name, value in read if _is_scalar(value, name)}
        if self.sender is not None:
            self.sender.note(trainer.global_step, scalars)
        else:
            _to_tensorboard(trainer, "hardware", scalars, trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._gather(trainer)

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._stop()
        self._gather(trainer)

    def on_exception(self, trainer: pl.Trainer, module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()
        if isinstance(exception, Interrupted) and exception.agreed and trainer.state.fn == "fit":
            try:
                self._gather(trainer)
            except RuntimeError as error:  # a node is gone already
                machine_readings.say(f"of other nodes the last is left out ({error})")

    def teardown(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def record_fields(self) -> dict[str, object]:
        """What is known now on this process: its own node, and the others as of their last epoch."""
        nodes = self.other_nodes | ({self.node_rank: self._node()} if self.sampler else {})
        return {"hardware": {"nodes": [nodes[rank] for rank in sorted(nodes)]}} if nodes else {}

    def _node(self) -> dict[str, Any]:
        assert self.sampler is not None
        return self.facts | {"stats": self.sampler.summary(), "throttled": sorted(self.sampler.throttled)}

    def _facts(self, psutil: Any) -> Config:
        return {
            "node_rank": self.node_rank,
            "host": socket.gethostname(),
            "cpu": machine_readings.cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / machine_readings.GIB, 2),
            "gpus": self.gpus.facts() if self.gpus else [],
        }

    def _read(self) -> Reading:
        assert self.gpus is not None
        return self.gpus.read() | self.cpus.read()

    def _watch_memory(self, reading: Reading) -> None:
        """Keep nvidia-smi's text of the fullest moment; asked at most every 10 s, in the sampler's thread."""
        used = sum(float(value) for name, value in reading.items() if _is_gpu_memory(name) and value is not None)
        now = time.monotonic()
        if used > PEAK_GROWTH * self.smi_peak_gib and now > self.smi_asked_at + PEAK_INTERVAL_S:
            self.smi_peak_gib, self.smi_asked_at = used, now
            self._write_smi("peak")

    def _write_smi(self, moment: str) -> None:
        if self.gpus is not None and self.gpus.gpus and (text := self.nvidia_smi()) is not None:
            self.folder.nvidia_smi(self.node_rank, moment).write_text(text)

    def _stop(self) -> None:
        if self.sampler is not None and not self.sampler.finished.is_set():
            self.sampler.stop()
            self._write_smi("end")
            if self.gpus is not None:
                self.gpus.close()

    def _rank_processes(self, trainer: pl.Trainer) -> dict[int, int]:
        """Rank → process id, of this node. A collective where there are several ranks."""
        mine = (trainer.node_rank, trainer.global_rank, os.getpid())
        return {rank: pid for node, rank, pid in gather_json(mine) if node == self.node_rank}

    def _gather(self, trainer: pl.Trainer) -> None:
        """Every node's figures on every rank, and its files on node 0; collectives, at epoch ends and at a stop."""
        if trainer.num_nodes == 1:
            return
        nodes = gather_json(self._node() if self.sampler else None)
        self.other_nodes = {node["node_rank"]: node for node in nodes if node}
        for rank, node in enumerate(nodes):
            if node and rank:
                sent = broadcast_json(self.sender.take() if self.sender else None, src=rank)
                if trainer.is_global_zero:
                    self._keep(trainer, node["node_rank"], sent)

    def _keep(self, trainer: pl.Trainer, node_rank: Any, sent: Any) -> None:
        try:
            if node_rank not in range(1, trainer.num_nodes):
                raise WrongValue("there is no such node")
            receiver = self.receivers.setdefault(node_rank, Receiver(self.folder, node_rank))
            for point in receiver.keep(sent):
                _to_tensorboard(trainer, f"hardware-node{node_rank}", point.values, point.step)
        except (WrongValue, OSError) as error:  # a reading is never worth a run
            machine_readings.say(f"of node {str(node_rank)[:20]} something is left out ({error}); training goes on")


def _to_tensorboard(trainer: pl.Trainer, place: str, scalars: dict[str, float], step: int) -> None:
    for logger in trainer.loggers:
        if logger.name == "tensorboard":  # the table of metrics has its own columns
            logger.log_metrics({f"{place}/{name}": value for name, value in scalars.items()}, step)


def _is_gpu_memory(name: str) -> bool:
    return name.startswith("gpu") and name.endswith("/memory_gib")


def _is_scalar(value: Any, name: str) -> TypeGuard[float]:
    """Single cores are too many for TensorBoard; the CSV has them."""
    return isinstance(value, float) and not (name.startswith("cpu") and name != "cpu/percent")
