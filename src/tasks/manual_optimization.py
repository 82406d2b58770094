"""Manual optimization (task=manual_optimization): a training step that calls the optimizer itself.

The example is sharpness-aware minimisation (SAM, arXiv 2010.01412). It takes the gradient at the
point near the weights where the loss is highest, and needs two backward passes per step.

python src/train.py task=manual_optimization task.radius=0.05
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lockstep.process.errors import UserError
from tasks.classifier import ImageClassifier


class SharpnessAware(ImageClassifier):
    """A classifier that is trained by SAM.

    Args:
        radius: the distance along the gradient at which the second backward pass is computed.
        net, parts: passed to ImageClassifier.
    """

    def __init__(
        self, net: nn.Module, *, num_classes: int, radius: float = 0.05, **parts: Any
    ) -> None:
        super().__init__(net, num_classes=num_classes, **parts)
        self.radius = radius
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        schedule = configured["lr_scheduler"]["scheduler"] if isinstance(configured, dict) else None
        if isinstance(schedule, ReduceLROnPlateau):
            raise UserError(
                "task=manual_optimization steps its schedule without a metric, which "
                "ReduceLROnPlateau needs: take another schedule, as scheduler=cosine."
            )
        return configured

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, targets = batch
        optimizer: Any = self.optimizers()

        # The first backward pass says where the loss rises.
        optimizer.zero_grad()
        logits = self.net(images)
        self.count_hits(logits, targets)
        loss = self.loss(logits, targets).mean()
        self.manual_backward(loss)
        steps = self._climb()

        # The second pass gives the gradient there. It is applied to the original weights.
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.net(images), targets).mean())
        _undo_climb(steps)
        optimizer.step()

        self._step_schedules()
        return {"loss": loss.detach()}

    @torch.no_grad()
    def _climb(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Move the weights along the gradient, and return each parameter with its step."""
        parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()

        # In 16 bits the gradient may overflow. Then the weights do not move.
        factor = torch.where(norm.isfinite(), self.radius / (norm + 1e-12), 0.0)
        steps = [(parameter, parameter.grad.nan_to_num() * factor) for parameter in parameters]
        for parameter, step in steps:
            parameter.add_(step)
        return steps

    def _step_schedules(self) -> None:
        """Step the schedules, because Lightning does not do it in manual optimization."""
        for config in self.trainer.lr_scheduler_configs:
            if config.interval == "step" or self.trainer.is_last_batch:
                config.scheduler.step()  # type: ignore[call-arg]


@torch.no_grad()
def _undo_climb(steps: list[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, step in steps:
        parameter.sub_(step)
