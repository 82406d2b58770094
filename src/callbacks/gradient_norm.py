"""The norm of the gradient of all parameters at log points: python src/train.py callbacks=gradient_norm

It is computed before clipping and summed on the device; one value is read at a log point, none in other steps.
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor


class GradientNorm(Callback):
    """Log the 2-norm of the gradient of all parameters, as one process on the whole batch computes it.

    Gradients are those that the optimizer steps on: averaged over ranks, accumulated, without fp16's scale.
    """

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if (trainer.global_step + 1) % trainer.log_every_n_steps == 0:
            norm = torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])
            whole = norm.full_tensor() if isinstance(norm, DTensor) else norm  # of shards: a collective
            pl_module.log("train/gradient_norm", whole, on_step=True, on_epoch=False)
