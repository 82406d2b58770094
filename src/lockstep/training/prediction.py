"""Predict with a trained model on the device of a rank, in the precision of the training."""

import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lockstep.config.compose import compose, whole_config
from lockstep.config.schema import key_of
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.process.errors import EXIT_FAILED, UserError
from lockstep.process.output import duration
from lockstep.ranks.collectives import has_ranks
from lockstep.ranks.failures import log_failure
from lockstep.ranks.find import Cluster, set_rank_environment
from lockstep.ranks.process_group import all_or_none, create_process_group
from lockstep.records.config import Config
from lockstep.runs.join import ignore_expected_warnings, threads_of
from lockstep.training.inference import FinishedModel
from lockstep.training.trainer import precision_of

log = logging.getLogger(__name__)

SHOWN_EVERY_S = 10.0


def trainer_config(overrides: list[str]) -> dict[str, Any]:
    """Return the composed config, in which only the trainer counts.

    Args:
        overrides: of trainer=; without a trainer it is one process, on a GPU where there is one.
    """
    config = whole_config(compose("train", overrides))
    keys = {key_of(override) for override in overrides}
    if "trainer" not in keys:
        one_process = {"launch": "one_process", "devices": 1, "num_nodes": 1, "strategy": None}
        config["trainer"] = {**config["trainer"], **one_process}
    if "trainer.precision" not in keys:
        config["trainer"]["precision"] = None
    return {**config, "task_name": "predict"}


def start_ranks(trainer: Config, cluster: Cluster) -> int:
    """Start the ranks of this node, each with this command line; return the exit code."""
    from lockstep.ranks import agent

    arguments = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="lockstep-predict-") as folder:
        end = agent.start_ranks(cluster, None, Path(folder), arguments, trainer["timeout_s"])
    # Rank 0 itself has said that images are damaged.
    if end.failure and end.failure["message"] != f"ended with exit code {EXIT_FAILED}":
        log_failure(end.failure, end.callstack)
    return end.exit_code


@contextmanager
def joined_ranks(trainer: Config, cluster: Cluster) -> Iterator[torch.device]:
    """Meet the other ranks, if there are any; yield the device of this rank."""
    device = torch.device("cpu")
    if cluster.accelerator == "gpu":
        device = torch.device("cuda", cluster.local_rank or 0)
        torch.set_float32_matmul_precision(trainer.get("matmul_precision", "high"))
    torch.set_num_threads(threads_of(trainer))
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
        precision: as trainer.precision.
    """

    model: FinishedModel
    device: torch.device
    precision: str = "32-true"

    def __post_init__(self) -> None:
        self.plugin = plugin_of(self.precision, self.device)
        self.module = self.plugin.convert_module(self.model.module).to(self.device)

    def results(self, batches: Iterable[Any], data: Any) -> Iterator[Any]:
        """Yield what predict_step returns for each batch, on the CPU.

        Args:
            batches: of a loader of `data`.
            data: the data module, whose hooks finish a batch on the device, as the module's own do
                where it has none.
        """
        before = self._owner("on_before_batch_transfer", data)
        mover = self._owner("transfer_batch_to_device", data)
        after = self._owner("on_after_batch_transfer", data)
        with torch.inference_mode(), self.plugin.predict_step_context():
            for number, loaded in enumerate(batches):
                ready = before.on_before_batch_transfer(loaded, 0)
                if hasattr(mover, "transfer_batch_to_device"):
                    moved = mover.transfer_batch_to_device(ready, self.device, 0)
                else:
                    moved = move_data_to_device(ready, self.device)
                batch = self.plugin.convert_input(after.on_after_batch_transfer(moved, 0))
                yield move_data_to_device(self.module.predict_step(batch, number), "cpu")

    def _owner(self, hook: str, data: Any) -> Any:
        """Return whose hook counts, as in Lightning: the data module's own, else the module's."""
        if not isinstance(data, pl.LightningDataModule) or is_overridden(hook, data):
            return data
        return self.module if hasattr(self.module, hook) else data


def predict_own_batches(predictor: Predictor, data: pl.LightningDataModule | None) -> list[Any]:
    """Return what Lightning's trainer.predict returns for the run's own loaders.

    It is a list of what predict_step returns for each batch, or a list of such lists where there
    are several loaders. Without a predict_dataloader the test data are predicted.

    Args:
        data: the data module; None where the module has the loaders.

    Raises:
        UserError: there is no loader.
    """
    _choose_loaders(predictor.module, data)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    is_gpu = predictor.device.type == "cuda"
    trainer = pl.Trainer(
        accelerator="gpu" if is_gpu else "cpu",
        devices=[predictor.device.index or 0] if is_gpu else 1,
        # In a job of SLURM, too, this is one process.
        plugins=[predictor.plugin, LightningEnvironment()],
        callbacks=[_EndsAtSigterm()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer.predict(predictor.module, datamodule=data) or []


def _choose_loaders(module: Any, data: Any) -> None:
    """Let predict_dataloader of the data or the module give the loaders, or else test_dataloader.

    Lightning would build each DataLoader anew, which fails for some classes and arguments. It gets
    their batches alone.
    """
    owners = [module] if data is None else [data, module]
    for name in ("predict_dataloader", "test_dataloader"):
        for owner in owners:
            if is_overridden(name, owner):
                make = partial(_loaders_of, owner, name, getattr(owner, name))
                owner.predict_dataloader = make
                return
    raise UserError(
        f"{type(owners[0]).__name__} has no images to predict: write its predict_dataloader, "
        "or pass images=DIR."
    )


def _loaders_of(owner: Any, name: str, make: Callable[[], Any]) -> Any:
    if name == "test_dataloader":
        owner.setup("test")
    loaders = make()
    if isinstance(loaders, CombinedLoader):
        return loaders
    combined = CombinedLoader(loaders, "sequential").flattened
    return [_Batches(loader) if isinstance(loader, DataLoader) else loader for loader in combined]


@dataclass
class _Batches:
    """The batches of a DataLoader."""

    loader: "DataLoader[Any]"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class _EndsAtSigterm(pl.Callback):
    """Restores the handler of SIGTERM: Lightning's only notes the signal, and predicts on."""

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGTERM, self.handler)


def plugin_of(precision: str, device: torch.device) -> Precision:
    """Return Lightning's plugin of a precision.

    A CPU computes in float32 what a GPU has computed in float16.
    """
    name: Any = precision_of(precision, is_gpu=device.type == "cuda")
    if name.startswith("16") and device.type == "cpu":
        name = "32-true"
    if name.endswith("-mixed"):
        return MixedPrecision(name, device.type)
    if name == "64-true":
        return DoublePrecision()
    if name.startswith(("16", "bf16")):
        return HalfPrecision(name)
    return Precision()


def patient_group() -> Any:
    """Return a group whose ranks wait for the slowest, whatever it takes; None for one process."""
    if not has_ranks():
        return None
    with all_or_none():
        return dist.new_group(backend="gloo", timeout=timedelta(days=7))


class Progress:
    """A line now and then: how many images are done, how fast, and the time left.

    Args:
        total: the images of all ranks.
        num_ranks: that predict as fast as this one.
    """

    def __init__(self, total: int, num_ranks: int = 1) -> None:
        self.total = total
        self.num_ranks = num_ranks
        self.done = 0
        self.began_at = time.monotonic()
        self.shown_at = self.began_at

    def add(self, count: int) -> None:
        self.done = min(self.done + count * self.num_ranks, self.total)
        now = time.monotonic()
        if now - self.shown_at < SHOWN_EVERY_S or self.done == self.total:
            return
        self.shown_at = now
        speed = self.done / (now - self.began_at)
        left = duration((self.total - self.done) / speed)
        log.info(f"{self.done:,} of {self.total:,} images · {speed:,.0f} images/s · {left} left")


def set_test_time_flip(model: FinishedModel, text: str) -> None:
    """Predict on images and their mirror images, or not; "" leaves what the run had.

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
