"""Regression (task=regression): a number for each image.

python src/train.py task=regression data=csv data.root=FILE.csv data.target=number
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.training.task import Task


class Regression(Task):
    """Train the Huber loss of the standardised target.

    Log the mean absolute and the mean squared error, in the unit of the targets.

    Args:
        net: (B, C, H, W) float → (B, 1).
        mean, std: mean and standard deviation of the targets; the net learns (target - mean) / std.
        parts: passed to Task.
    """

    def __init__(
        self, net: nn.Module, *, mean: float = 0.0, std: float = 1.0, **parts: Any
    ) -> None:
        super().__init__(net, **parts)
        self.mean = mean
        self.std = std

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        standardised = (targets - self.mean) / self.std
        return F.huber_loss(self.net(images).squeeze(1), standardised)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        errors = self.predict_step(batch, batch_idx) - batch[1]
        self.count(mae=errors.abs(), mse=errors.square())

    test_step = validation_step

    def predict_step(self, batch: Tensor | tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return (B,) numbers in the unit of the targets."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.net(images).squeeze(1) * self.std + self.mean
