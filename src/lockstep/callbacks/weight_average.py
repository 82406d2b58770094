"""Average the weights of a training in `_average_model`, a private name of Lightning's."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class WeightAverage(EMAWeightAveraging):
    """An exponential moving average of the weights, which is validated, tested and saved.

    The decay is small in the first steps. The averaged weights and buffers take the place of the
    trained ones from the start of a validation to its end. So on_validation_epoch_end of a module
    reads what the validation counted in a buffer. A checkpoint that is saved in a validation still
    has the average as its weights. All ranks validate with rank 0's averaged buffers, because these
    are saved.

    Args:
        decay: the share of the average that each step keeps, after the first steps.
        device: the device of training. The module moves there after the callbacks are set up.
    """

    def __init__(self, decay: float, device: torch.device | None = None) -> None:
        super().__init__(device=device, decay=decay)
        self.decay = decay
        self.is_exchanged = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        # An earlier fit may have been stopped in a validation.
        self.is_exchanged = False
        average = self._average_model
        if average is None:
            return

        # Every step reads the counter. Reading it from a GPU would wait for the device.
        average.n_averaged = torch.zeros((), dtype=torch.long)
        average.update_parameters = partial(update_average, average, self.decay)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_epoch_start(trainer, pl_module)
        self.is_exchanged = self._average_model is not None
        # Before the exchange the strategy gave all ranks rank 0's trained buffers. This second call
        # gives them its averaged ones.
        trainer.strategy.on_validation_start()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Exchange nothing: the module's own hook comes after this one."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_validation_epoch_end(trainer, pl_module)
        self.is_exchanged = False

    def on_save_checkpoint(
        self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        averaged_state = checkpoint["state_dict"]
        super().on_save_checkpoint(trainer, module, checkpoint)
        if self.is_exchanged:
            # The module holds the average now, and the average's module the trained weights.
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = averaged_state


@torch.no_grad()
def update_average(average: AveragedModel, decay: float, trained_module: nn.Module) -> None:
    """Update the average as torch's `update_parameters` does, without waiting for the device.

    torch's function also fails if weights of 16 bits are trained. The decay is at most
    (1 + n) / (10 + n) after n steps, as in TensorFlow's ExponentialMovingAverage: a constant decay
    would keep the initial weights for 1 / (1 - decay) steps. The average keeps its precision, and
    integers are copied.
    """
    steps = int(average.n_averaged)
    decay_of_step = 0.0
    if steps > 0:
        decay_of_step = min(decay, (1 + steps) / (10 + steps))
    apply_average = get_ema_multi_avg_fn(decay_of_step)

    # torch has one kernel for many tensors of one dtype.
    averages: dict[torch.dtype, list[Any]] = defaultdict(list)
    trained_tensors: dict[torch.dtype, list[Any]] = defaultdict(list)
    for average_tensor, trained_tensor in zip(
        _tensors(average.module), _tensors(trained_module), strict=True
    ):
        if average_tensor.is_floating_point():
            averages[average_tensor.dtype].append(average_tensor)
            trained_tensors[average_tensor.dtype].append(trained_tensor.detach().to(average_tensor))
        else:
            average_tensor.copy_(trained_tensor)
    for dtype, tensors in averages.items():
        apply_average(tensors, trained_tensors[dtype], steps)
    average.n_averaged += 1


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
