"""Predict with a trained model on the device of a rank, in the precision of the training."""

import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.config.compose import compose, whole_config
from lockstep.config.schema import key_of
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.process.errors import EXIT_FAILED, UserError
from lockstep.process.output import format_duration
from lockstep.ranks.collectives import has_ranks
from lockstep.ranks.failures import log_failure
from lockstep.ranks.find import Cluster, set_rank_environment
from lockstep.ranks.gpus import refuse_unusable_gpus
from lockstep.ranks.placement import one_process_options
from lockstep.ranks.process_group import all_or_none, create_process_group
from lockstep.records.config import Config
from lockstep.runs.join import count_threads, ignore_expected_warnings
from lockstep.training.inference import FinishedModel
from lockstep.training.trainer import resolve_precision

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0


def prediction_config(overrides: list[str]) -> dict[str, Any]:
    """Return a whole config; a prediction uses its trainer alone.

    Args:
        overrides: options of trainer=. The default is one process, on a GPU if there is one.
    """
    config = whole_config(compose("train", overrides))
    keys = {key_of(override) for override in overrides}
    if "trainer" not in keys:
        config["trainer"] = one_process_options(config["trainer"], keys)
    if "trainer.precision" not in keys:
        config["trainer"]["precision"] = None
    return {**config, "task_name": "predict"}


def start_prediction_ranks(trainer: Config, cluster: Cluster) -> int:
    """Start the ranks of this node, each with this command line; return the exit code."""
    from lockstep.ranks import agent

    arguments = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="lockstep-predict-") as folder:
        end = agent.start_ranks(cluster, None, Path(folder), arguments, trainer["timeout_s"])
    # predict.py ends with this code for damaged images, which rank 0 has logged already.
    if end.failure and end.failure["message"] != agent.describe_exit(EXIT_FAILED):
        log_failure(end.failure, end.callstack)
    return end.exit_code


@contextmanager
def prediction_ranks(trainer: Config, cluster: Cluster) -> Iterator[torch.device]:
    """Meet the other ranks, if there are any; yield the device of this rank."""
    device = torch.device("cpu")
    if cluster.accelerator == "gpu":
        index = cluster.local_rank or 0
        refuse_unusable_gpus([index])
        device = torch.device("cuda", index)
        torch.set_float32_matmul_precision(trainer.get("matmul_precision", "high"))
    torch.set_num_threads(count_threads(trainer))
    ignore_expected_warnings()
    if cluster.world_size == 1:
        yield device
        return
    set_rank_environment(cluster)
    create_process_group(cluster, device, trainer["timeout_s"])
    try:
        yield device
    finally:
        dist.destroy_process_group()


@dataclass
class Predictor:
    """A trained model on a device.

    Args:
        precision: a value of trainer.precision.
    """

    model: FinishedModel
    device: torch.device
    precision: str = "32-true"

    def __post_init__(self) -> None:
        self.precision_plugin = create_precision_plugin(self.precision, self.device)
        self.module = self.precision_plugin.convert_module(self.model.module).to(self.device)

    def predictions(self, batches: Iterable[Any], data: Any) -> Iterator[Any]:
        """Yield what predict_step returns for each batch, on the CPU.

        Args:
            batches: a loader of `data`.
            data: the data module. The module's hooks finish a batch if it does not override them.
        """
        # A context around the yield would hold in the caller and in the workers of the loader too.
        for batch_idx, batch in enumerate(batches):
            yield self._predict(batch, batch_idx, data)

    @torch.inference_mode()
    def _predict(self, loaded_batch: Any, batch_idx: int, data: Any) -> Any:
        owner = self._hook_owner("on_before_batch_transfer", data)
        batch = owner.on_before_batch_transfer(loaded_batch, 0)
        owner = self._hook_owner("transfer_batch_to_device", data)
        if hasattr(owner, "transfer_batch_to_device"):
            batch = owner.transfer_batch_to_device(batch, self.device, 0)
        else:
            batch = move_data_to_device(batch, self.device)
        owner = self._hook_owner("on_after_batch_transfer", data)
        batch = self.precision_plugin.convert_input(owner.on_after_batch_transfer(batch, 0))
        with self.precision_plugin.predict_step_context():
            outputs = self.module.predict_step(batch, batch_idx)
        return move_data_to_device(outputs, "cpu")

    def _hook_owner(self, hook: str, data: Any) -> Any:
        """Return the object whose hook Lightning calls: data that override it, or the module.

        A data module that is not Lightning's has all hooks itself.
        """
        has_hook = not isinstance(data, pl.LightningDataModule) or is_overridden(hook, data)
        if has_hook or not hasattr(self.module, hook):
            return data
        return self.module


def create_precision_plugin(precision: str, device: torch.device) -> Precision:
    """Return Lightning's plugin of a precision.

    A CPU computes in float32 what a GPU has computed in float16.
    """
    name: Any = resolve_precision(precision, is_gpu=device.type == "cuda")
    if name.startswith("16") and device.type == "cpu":
        name = "32-true"
    if name.endswith("-mixed"):
        return MixedPrecision(name, device.type)
    if name == "64-true":
        return DoublePrecision()
    if name.startswith(("16", "bf16")):
        return HalfPrecision(name)
    return Precision()


def create_patient_group() -> Any:
    """Return a group whose ranks wait a week for the slowest; None for one process."""
    if not has_ranks():
        return None
    with all_or_none():
        return dist.new_group(backend="gloo", timeout=timedelta(days=7))


class PredictionProgress:
    """A line now and then: how many images are done, how fast, and the time left.

    Args:
        total: the images of all ranks.
        num_ranks: the ranks that predict, which are assumed to be equally fast.
    """

    def __init__(self, total: int, num_ranks: int = 1) -> None:
        self.total = total
        self.num_ranks = num_ranks
        self.done = 0
        self.began_at = time.monotonic()
        self.logged_at = self.began_at

    def add(self, count: int) -> None:
        self.done = min(self.done + count * self.num_ranks, self.total)
        now = time.monotonic()
        if now - self.logged_at < LOG_INTERVAL_S or self.done == self.total:
            return
        self.logged_at = now
        speed = self.done / (now - self.began_at)
        time_left = format_duration((self.total - self.done) / speed)
        log.info(
            f"{self.done:,} of {self.total:,} images · {speed:,.0f} images/s · {time_left} left"
        )


def set_test_time_flip(model: FinishedModel, text: str) -> None:
    """Set whether to predict on images and their mirror images; "" keeps what the run had.

    Raises:
        UserError: it is neither true nor false, or the task has no such option.
    """
    if not text:
        return
    if text.lower() not in ("true", "false"):
        raise UserError(f"task.test_time_flip={text} must be true or false.")
    if not hasattr(model.module, "test_time_flip"):
        raise UserError(
            f"The task {type(model.module).__name__} has no test_time_flip: leave it out."
        )
    model.module.test_time_flip = text.lower() == "true"


def set_device(data: Any, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
    """Let an image data module make its batches on a device, for one of several ranks."""
    if isinstance(data, ImageDataModule):
        data.attach_to_ranks(rank=rank, world_size=world_size, device=device)
