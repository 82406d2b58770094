"""An exponential moving average of the weights: validated, tested and saved; what is trained is saved beside it."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage(EMAWeightAveraging):
    """Lightning's, which exchanges trained and averaged weights for the time of a validation; here a checkpoint of a
    run that is stopped in it has each in its place, and all ranks validate with rank 0's averaged buffers, which are
    those that it saves.

    Args:
        decay: share of the average that stays in each step.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(decay=decay)
        self._kwargs = {"multi_avg_fn": get_ema_multi_avg_fn(decay)}  # all tensors at once: a few kernels a step
        self.is_exchanged = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._device = trainer.strategy.root_device  # the module gets there later
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            # Its count decides what is done: read from a GPU, it would stop every step.
            self._average_model.n_averaged = torch.zeros((), dtype=torch.long)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self.is_exchanged = self._average_model is not None
        trainer.strategy.on_validation_start()  # again: it gave all ranks rank 0's buffers of what is trained

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self.is_exchanged = False

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        averaged = checkpoint["state_dict"]
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.is_exchanged:
            checkpoint["state_dict"], checkpoint["current_model_state"] = averaged, checkpoint["state_dict"]
