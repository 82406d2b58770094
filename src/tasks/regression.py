"""Regression (task=regression): a number for each image.

python src/train.py task=regression data=csv data.root=FILE.csv data.target=number
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.process.errors import UserError
from lockstep.training.parameter_groups import head_names
from lockstep.training.task import Task

# The largest error of a prediction by the folded scale, as a share of the deviation.
FOLDED_ERROR = 1e-3


class Regression(Task):
    """Train the Huber loss of the standardised target.

    Log the mean absolute and the mean squared error, in the unit of the targets.

    Args:
        net: a net from images (B, C, H, W) float to (B, 1).
        mean, std: the net learns (target - mean) / std; None: take target_mean and target_std.
        target_mean, target_std: mean and standard deviation of the training targets.
        parts: passed to Task.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        mean: float | None = None,
        std: float | None = None,
        target_mean: float = 0.0,
        target_std: float = 1.0,
        **parts: Any,
    ) -> None:
        super().__init__(net, **parts)
        self.mean = target_mean if mean is None else mean
        self.std = target_std if std is None else std
        if self.std <= 0:
            raise UserError(
                f"task.std={self.std} must be above 0. Leave it out to take that of the data."
            )

    def setup(self, stage: str) -> None:
        precision = self.trainer.precision
        if precision in ("bf16-true", "16-true"):
            raise UserError(
                f"trainer.precision={precision} rounds the targets of task=regression to 16 bits: "
                "give bf16-mixed, 16-mixed or 32-true."
            )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        standardised = (targets - self.mean) / self.std
        outputs = self.net(images)
        _check_outputs(outputs)
        return F.huber_loss(outputs.squeeze(1), standardised)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        predictions = self.predict_step(batch, batch_idx)
        errors = predictions - batch[1]
        self.count(mae=errors.abs(), mse=errors.square())
        return {"losses": errors.square(), "predictions": predictions}

    test_step = validation_step

    def predict_step(self, batch: Tensor | tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return (B,) numbers in the unit of the targets."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        outputs = self.net(images).squeeze(1)
        if outputs.dtype in (torch.float16, torch.bfloat16):
            # 16 bits cannot hold large targets, such as prices of 300,000.
            outputs = outputs.float()
        return outputs * self.std + self.mean

    def fold_scale(self, images: Tensor) -> None:
        """Change the net's last layer so that its outputs are in the unit of the targets.

        An export needs it. If the last layer is not linear with a bias, or its outputs are not the
        net's, nothing changes.

        Args:
            images: a batch of which the predictions stay the same.
        """
        layers = {name.rpartition(".")[0] for name in head_names(self.net)}
        if len(layers) != 1:
            return
        head = self.net.get_submodule(layers.pop())
        if not isinstance(head, nn.Linear) or head.bias is None:
            return
        mean, std, state = self.mean, self.std, copy.deepcopy(head.state_dict())
        with torch.no_grad():
            expected = self.predict_step(images, 0)
            head.weight.mul_(std)
            head.bias.mul_(std).add_(mean)
            self.mean, self.std = 0.0, 1.0
            error = (self.predict_step(images, 0) - expected).abs().max()
        # The last matrix need not be the last operation: a sigmoid may come after it.
        if not error <= FOLDED_ERROR * std:
            head.load_state_dict(state)
            self.mean, self.std = mean, std


def _check_outputs(outputs: Any) -> None:
    """Raise UserError if a net does not return one number for each image."""
    if isinstance(outputs, Tensor) and outputs.ndim == 2 and outputs.shape[1] == 1:
        return
    what = f"a {type(outputs).__name__}"
    if isinstance(outputs, Tensor):
        what = f"the shape {tuple(outputs.shape)}"
    raise UserError(
        f"task=regression needs a net that returns one number for each image, (images, 1), and "
        f"this one returns {what}: give a net of model=, as model=small_cnn."
    )
