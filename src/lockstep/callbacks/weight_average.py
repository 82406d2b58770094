"""An exponential moving average of the weights: validated, tested and saved; what is trained is saved beside it."""

from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel


class WeightAverage(EMAWeightAveraging):
    """Lightning's, which exchanges trained and averaged weights for the time of a validation; here a checkpoint of a
    run that is stopped in it has each in its place, and all ranks validate with rank 0's averaged buffers, which are
    those that it saves.

    Args:
        decay: share of the average that stays in each step.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(decay=decay)
        self.decay = decay
        self.is_exchanged = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._device = trainer.strategy.root_device  # the module gets there later
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            self._average_model.n_averaged = torch.zeros((), dtype=torch.long)  # read in every step: not from a GPU
            self._average_model.update_parameters = partial(update, self._average_model, self.decay)

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


@torch.no_grad()
def update(average: AveragedModel, decay: float, trained: nn.Module) -> None:
    """AveragedModel's own reads its count from the device and takes a few kernels for every tensor.

    The average stays in the precision that it began in; counts (integers) are copied.
    """
    pairs = list(
        zip(
            chain(average.module.parameters(), average.module.buffers()),
            chain(trained.parameters(), trained.buffers()),
            strict=True,
        )
    )
    averaged = [(own, new) for own, new in pairs if own.is_floating_point() and average.n_averaged > 0]
    held = {id(own) for own, _ in averaged}
    for own, new in pairs:
        if id(own) not in held:
            own.copy_(new)
    if averaged:
        news = [new.detach().to(own.device, own.dtype) for own, new in averaged]
        torch._foreach_lerp_([own for own, _ in averaged], news, 1 - decay)
    average.n_averaged += 1
