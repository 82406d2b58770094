"""Find the largest batch that trains: start train.py for two steps per batch and read the memory.

The runs use all devices of this node. A training on several nodes takes the same batch per device:
FSDP over more devices needs less memory on each, and DDP needs the same.
"""

import json
import logging
import math
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.config.overrides import overrides_of_short_run
from lockstep.process import signals
from lockstep.process.environment import environment
from lockstep.process.errors import EXIT_OK, EXIT_USER_ERROR, UserError
from lockstep.process.project import REPOSITORY
from lockstep.ranks.find import Cluster
from lockstep.ranks.placement import count_devices_per_rank
from lockstep.records.batch import Batch
from lockstep.records.config import Config
from lockstep.records.record import is_out_of_memory

log = logging.getLogger(__name__)

# Images per device of the first run
FIRST_BATCH = 8
MAX_RUNS = 8
# Use at most 95 % of the free memory: the real run fragments it differently.
USABLE_SHARE = 0.95
# Try at most 95 % of a failed batch. Stop when the next try would be within 5 % of the best one.
CLOSE_SHARE = 0.95
GIB = 2**30
# So ends the refusal of a batch that is larger than an epoch.
REFUSAL_BY_EPOCH = re.compile(r"give a size from 1 to (\d+)\.$")
TRAIN_SCRIPT = REPOSITORY / "src" / "train.py"
# So end runs whose batch is too large, though the error does not say so.
SIGNS_OF_LARGE_BATCH = ("status_not_initialized", "unable to find an engine", "sigkill")
LAUNCHER_PREFIXES = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "NODE_RANK",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "PMI_",
    "MPI_LOCAL",
    "LOCKSTEP_",
)


class BatchRefused(UserError):
    """The refusal of a batch by train.py, with its sentence."""


@dataclass
class BatchProbes:
    """The batches per device that were tried, and the one that comes next.

    Args:
        micro_batches_per_step: micro-batches of a global batch, over all ranks.
        unit: every batch is a multiple of it.
        limit_gib: memory of a device; inf until a run has told it.
        max_batch: the largest batch of which an epoch has one; inf until a run has told it.
        peaks: peak memory in GiB by batch; None where it ran out of memory.
    """

    micro_batches_per_step: int = 1
    unit: int = 1
    limit_gib: float = math.inf
    max_batch: float = math.inf
    peaks: dict[int, float | None] = field(default_factory=dict)

    @property
    def fitting(self) -> list[int]:
        """The batches within the limit."""
        return [batch for batch, peak in self.peaks.items() if peak and peak <= self.limit_gib]

    @property
    def largest(self) -> int:
        """The largest batch that fits; 0 if none does.

        The first probe of a run on several nodes may fit one node and be larger than an epoch.
        """
        return max((batch for batch in self.fitting if batch <= self.max_batch), default=0)

    @property
    def smallest_failed(self) -> float:
        return min(self.peaks.keys() - self.fitting, default=math.inf)

    @property
    def bounded_by(self) -> str:
        """The data set, if no batch up to an epoch has failed; else the memory."""
        is_near_epoch = self.largest >= CLOSE_SHARE * self.max_batch
        return "data set" if is_near_epoch and self.smallest_failed > self.max_batch else "memory"

    def bound_by_epoch(self, epoch_size: int) -> None:
        """Set the largest batch from the images of an epoch; refuse an epoch without a step."""
        smallest_step = self.micro_batches_per_step * self.unit
        if epoch_size < smallest_step:
            raise UserError(
                f"A step on these ranks takes at least {smallest_step} images, but an epoch has "
                f"{epoch_size}. Use fewer ranks or a smaller trainer.accumulate_grad_batches."
            )
        self.max_batch = epoch_size // smallest_step * self.unit

    def add(self, batch: int, record: Mapping[str, Any], config: Config) -> None:
        """Add a run.

        Args:
            record: the run's run.json. Its peak is None if memory ran out.
        """
        peak = record["peak_memory_gib"]
        self.peaks[batch] = peak
        usable = record.get("usable_memory_gib")
        if config["trainer"]["memory_limit_gib"]:
            self.limit_gib = config["trainer"]["memory_limit_gib"]
        elif usable:
            self.limit_gib = USABLE_SHARE * usable
        if record.get("num_train"):
            self.bound_by_epoch(config["data"].get("epoch_size") or record["num_train"])
        usage = f"{peak:.3g} of {self.limit_gib:.3g} GiB" if peak else "out of memory"
        log.info(f"{batch} images per device: {usage}")

    def choose_next(self) -> int | None:
        """Return the batch to try next; None if the search is over."""
        if len(self.peaks) >= MAX_RUNS:
            return None
        if not self.peaks:
            aim: float = FIRST_BATCH
        elif not self.largest:
            aim = self.smallest_failed / 4
        else:
            aim = self._choose_below_failed(self._extrapolate_to_limit())
        batch = int(max(min(aim, self.max_batch), self.unit) // self.unit * self.unit)
        if batch in self.peaks or self.largest >= CLOSE_SHARE * batch:
            return None
        return batch

    def _extrapolate_to_limit(self) -> float:
        """Return the batch where a line through the last two peaks meets the limit.

        With 1 GiB for 8 images and 4 GiB for 64, a limit of 16 GiB is met at 288.
        """
        points = []
        for batch, peak in sorted(self.peaks.items()):
            if peak and batch <= self.smallest_failed:
                points.append((batch, peak))
        if len(points) < 2:
            return 8 * self.largest
        (small, low), (large, high) = points[-2:]
        slope = max(high - low, 1e-9) / (large - small)
        return min(small + (self.limit_gib - low) / slope, 8 * self.largest)

    def _choose_below_failed(self, aim: float) -> float:
        """Return a batch below the smallest one that has failed."""
        if aim >= self.smallest_failed:
            aim = math.sqrt(self.largest * self.smallest_failed)
            # The first prediction is at most a little too high.
            if len(self.peaks) == len(self.fitting) + 1 and len(self.fitting) > 1:
                aim = max(aim, 0.9 * self.smallest_failed)
        return min(aim, CLOSE_SHARE * self.smallest_failed)

    def find_largest(self) -> int:
        """Return the largest batch within the limit; raise UserError if none is."""
        if self.largest:
            return self.largest
        memory = "the memory of a device"
        if math.isfinite(self.limit_gib):
            memory = f"{self.limit_gib:.3g} GiB"
        raise UserError(
            f"Not even {min(self.peaks)} images per device fit into {memory}. Use a smaller model, "
            "trainer=fsdp over more devices, or trainer.activation_checkpointing=true."
        )


def search_largest_batch(config: Config, cluster: Cluster, smallest: Batch) -> dict[str, Any]:
    """Run train.py with several batches; return the fields of `largest_batch` in the record."""
    probes = BatchProbes(cluster.world_size * smallest.accumulate, _find_batch_unit(config))
    while (batch := probes.choose_next()) is not None:
        try:
            record = _train_two_steps(config, cluster, smallest, batch)
        except BatchRefused as refusal:
            epoch = REFUSAL_BY_EPOCH.search(str(refusal))
            if epoch and math.isinf(probes.max_batch):
                # The first batch is larger than an epoch, whose size the refusal tells.
                probes.bound_by_epoch(int(epoch[1]))
                continue
            # BatchNorm refuses a single image, which is tried only after two have not fit.
            if not probes.peaks or batch > min(probes.peaks):
                raise
            break
        probes.add(batch, record, config)

    largest = probes.find_largest()
    return {
        "per_device": largest,
        "global": largest * probes.micro_batches_per_step,
        "probes": len(probes.peaks),
        "peak_memory_gib": probes.peaks[largest],
        "limit_gib": round(probes.limit_gib, 4),
        "bounded_by": probes.bounded_by,
    }


def _find_batch_unit(config: Config) -> int:
    """Return the number of which every batch per device is a multiple."""
    augmentation = config["augmentation"]
    # Mixup and CutMix mix pairs of images.
    mixes = augmentation.get("mixup_alpha", 0) or augmentation.get("cutmix_alpha", 0)
    return math.lcm(2 if mixes else 1, config["trainer"].get("micro_batches") or 1)


def _train_two_steps(
    config: Config, cluster: Cluster, smallest: Batch, batch: int
) -> dict[str, Any]:
    """Return the record of a run of two steps and one validation batch.

    Its peak is None if memory ran out.

    Raises:
        BatchRefused: train.py has refused the batch with a sentence.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-batch-") as name:
        folder = Path(name)
        code = run_train(
            _build_overrides(config, cluster, smallest, batch, folder),
            environment(),
            folder / "output",
        )
        path = folder / "train/runs/probe/run.json"
        record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        lines = (folder / "output").read_text().splitlines()
    if code == EXIT_OK:
        return record
    text = "\n".join([*lines[-30:], str(record.get("error"))])
    # The kernel kills a process that takes more memory than there is.
    is_killed = code == -signal.SIGKILL
    has_sign = any(sign in text.lower() for sign in SIGNS_OF_LARGE_BATCH)
    if is_killed or has_sign or is_out_of_memory(text):
        return {**record, "peak_memory_gib": None}
    if code == EXIT_USER_ERROR:
        raise BatchRefused(lines[-1].removeprefix("error: "))
    raise RuntimeError(
        f"train.py with {batch} images per device ended with exit code {code}:\n{text}"
    )


def _build_overrides(
    config: Config, cluster: Cluster, smallest: Batch, batch: int, folder: Path
) -> list[str]:
    """Return the command line of a run of two steps, which writes below `folder`."""
    trainer = config["trainer"]
    accumulate = smallest.accumulate
    changes: dict[str, Any] = {
        "data.global_batch_size": batch * cluster.ranks_per_node * accumulate,
        "trainer.accumulate_grad_batches": accumulate,
        "trainer.max_steps": 2,
        "trainer.limit_train_batches": 2 * accumulate,
        "trainer.limit_val_batches": 1,
        "trainer.val_check_interval": 1.0,
        "test": False,
        "pictures": False,
        "logbook": "null",
        "s3.uri": "null",
        "++callbacks.checkpoints": "null",
        # This callback records the peak memory.
        "++callbacks.hardware": "{_target_: lockstep.callbacks.hardware_stats.HardwareStats}",
        "run_id": "probe",
        "paths.log_dir": folder,
    }
    if trainer["launch"] != "one_process":
        changes["trainer.devices"] = cluster.ranks_per_node * count_devices_per_rank(trainer)
        changes["trainer.num_nodes"] = 1
    if "pretrained" in config["model"]:
        changes["model.pretrained"] = False
    return overrides_of_short_run(config["overrides"], changes)


def remove_launcher_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without those by which a launcher describes a rank."""
    return {
        name: value for name, value in environ.items() if not name.startswith(LAUNCHER_PREFIXES)
    }


def run_train(overrides: list[str], environ: Mapping[str, str], output: Path) -> int:
    """Run train.py without a launcher's variables, until it or this process ends.

    Returns:
        Its exit code.
    """
    variables = remove_launcher_variables(environ)
    # While the child starts, a signal is only recorded: an exception would leave the child alone.
    previous = signals.install_stop_handler(signals.record_signal)
    command = [sys.executable, str(TRAIN_SCRIPT), *overrides]
    with output.open("w") as file:
        child = subprocess.Popen(command, env=variables, stdout=file, stderr=file)
    try:
        signals.install_stop_handler(signals.interrupt)
        signals.raise_if_received()
        return child.wait()
    finally:
        child.terminate()
        child.wait()
        signals.restore_handlers(previous)
