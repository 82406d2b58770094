"""Uses Lightning's `_average_model`, which has no public name: to update and to save the average."""

from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class WeightAverage(EMAWeightAveraging):
    """An exponential moving average of the weights, with a decay that begins small: validated, tested and saved.

    Lightning exchanges trained and averaged weights for a validation. A checkpoint of a run that is stopped in it has
    each in its place, and all ranks validate with rank 0's averaged buffers, which are those that are saved.

    Args:
        decay: share of the average that stays in each step, once there have been many.
        device: the device of training; the module gets there only after callbacks are set up.
    """

    def __init__(self, decay: float, device: torch.device | None = None) -> None:
        super().__init__(device=device, decay=decay)
        self.decay, self.is_exchanged = decay, False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
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

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        averaged = checkpoint["state_dict"]
        super().on_save_checkpoint(trainer, module, checkpoint)
        if self.is_exchanged:
            checkpoint["state_dict"], checkpoint["current_model_state"] = averaged, checkpoint["state_dict"]


@torch.no_grad()
def update(average: AveragedModel, decay: float, trained: nn.Module) -> None:
    """Average as `update_parameters`, which waits for the device in every step and fails if 16 bits are trained.

    The decay is at most (1 + n) / (10 + n) after n steps, as in TensorFlow's ExponentialMovingAverage: a constant one
    would keep the initial weights for 1 / (1 - decay) steps. The average stays in the precision that it began in;
    integers are copied.
    """
    of_average, of_trained = (chain(module.parameters(), module.buffers()) for module in (average.module, trained))
    floats: dict[torch.dtype, list[Any]] = {}  # torch has one kernel for many tensors of one dtype
    for own, new in zip(of_average, of_trained, strict=True):
        if own.is_floating_point():
            floats.setdefault(own.dtype, []).append((own, new.detach().to(own)))
        else:
            own.copy_(new)
    steps = int(average.n_averaged)
    decay = min(decay, (1 + steps) / (10 + steps)) if steps else 0.0
    for pairs in floats.values():
        get_ema_multi_avg_fn(decay)(*map(list, zip(*pairs, strict=True)), steps)
    average.n_averaged += 1
