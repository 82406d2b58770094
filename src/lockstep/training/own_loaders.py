"""Predict the batches of a run's own loaders by Lightning's Trainer, in one process."""

import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from lockstep.process.errors import UserError
from lockstep.training.prediction import Predictor


def predict_own_batches(predictor: Predictor, data: pl.LightningDataModule | None) -> list[Any]:
    """Return what Lightning's trainer.predict returns for the run's own loaders.

    It is a list of what predict_step returns for each batch, or a list of such lists where there
    are several loaders. Without a predict_dataloader the test data are predicted.

    Args:
        data: the data module; None where the module has the loaders.

    Raises:
        UserError: there is no loader.
    """
    _install_predict_dataloader(predictor.module, data)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    is_gpu = predictor.device.type == "cuda"
    trainer = pl.Trainer(
        accelerator="gpu" if is_gpu else "cpu",
        devices=[predictor.device.index or 0] if is_gpu else 1,
        # This is one process, in a job of SLURM, too.
        plugins=[predictor.precision_plugin, LightningEnvironment()],
        callbacks=[_RestoreSigterm()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer.predict(predictor.module, datamodule=data) or []


def _install_predict_dataloader(module: Any, data: Any) -> None:
    """Let Lightning predict the loaders of predict_dataloader, or else of test_dataloader.

    The data module's hook comes before the module's.
    """
    owners = [module] if data is None else [data, module]
    for name in ("predict_dataloader", "test_dataloader"):
        for owner in owners:
            if is_overridden(name, owner):
                make_loaders = partial(_call_loader_hook, owner, name, getattr(owner, name))
                # trainer.predict calls no other hook.
                owner.predict_dataloader = make_loaders
                return
    raise UserError(
        f"{type(owners[0]).__name__} has no images to predict: write its predict_dataloader, "
        "or pass images=DIR."
    )


def _call_loader_hook(owner: Any, hook: str, make_loaders: Callable[[], Any]) -> Any:
    """Return the loaders of a hook as a CombinedLoader or a list, which Lightning takes."""
    # Lightning calls setup("predict"), which need not prepare the data of this hook.
    if hook == "test_dataloader":
        owner.setup("test")
    loaders = make_loaders()
    if isinstance(loaders, CombinedLoader):
        return loaders
    flat_loaders = CombinedLoader(loaders, "sequential").flattened
    return [
        _Batches(loader) if isinstance(loader, DataLoader) else loader for loader in flat_loaders
    ]


@dataclass
class _Batches:
    """The batches of a DataLoader, without the class by which Lightning would rebuild it.

    Lightning fails to rebuild some classes and arguments.
    """

    loader: "DataLoader[Any]"

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)


class _RestoreSigterm(pl.Callback):
    """Restore the handler of SIGTERM. Lightning's own only notes the signal, and predicts on."""

    def __init__(self) -> None:
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        signal.signal(signal.SIGTERM, self.handler)
