"""The norm of the gradient of all parameters at log points.

It is computed before clipping and summed on the device. One value is read at a log point, none in
other steps.

python src/train.py callbacks=gradient_norm
"""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor


class GradientNorm(Callback):
    """Log the 2-norm of the gradient of all parameters, as one process on the whole batch would.

    Gradients are those that the optimizer steps on: averaged over ranks, accumulated, without
    fp16's scale.
    """

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        is_log_point = (trainer.global_step + 1) % trainer.log_every_n_steps == 0
        if not is_log_point:
            return

        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        # Gradients in shards need a collective. Every rank takes part, as all have the log point.
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        pl_module.log("train/gradient_norm", norm, on_step=True, on_epoch=False)
