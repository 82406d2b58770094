"""Manual optimization (task=manual_optimization): a training step that calls the optimizer itself.

The example is sharpness-aware minimisation (SAM, arXiv 2010.01412), which takes the gradient where the loss is highest
near the weights: two backward passes per step.
python src/train.py task=manual_optimization task.radius=0.05
"""

from typing import Any

import torch
from torch import Tensor, nn

from tasks.classifier import ImageClassifier


class SharpnessAware(ImageClassifier):
    """A classifier that is trained by SAM.

    Args:
        radius: distance along the gradient at which the second backward pass is computed.
        net, parts: passed to ImageClassifier.
    """

    def __init__(self, net: nn.Module, *, num_classes: int, radius: float = 0.05, **parts: Any) -> None:
        super().__init__(net, num_classes=num_classes, **parts)
        self.radius, self.automatic_optimization = radius, False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, targets = batch
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        logits = self.net(images)
        self.count_hits(logits, targets)
        loss = self.loss(logits, targets).mean()
        self.manual_backward(loss)
        steps = self._climb()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.net(images), targets).mean())
        with torch.no_grad():
            for parameter, step in steps:
                parameter.sub_(step)
        optimizer.step()
        for each in self.trainer.lr_scheduler_configs:
            if each.interval == "step" or self.trainer.is_last_batch:
                each.scheduler.step()  # type: ignore[call-arg]
        return {"loss": loss.detach()}

    @torch.no_grad()
    def _climb(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Move the weights along the gradient; return each parameter with its step."""
        trained = [parameter for parameter in self.parameters() if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in trained])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of shards
        length = torch.where(norm.isfinite(), self.radius / (norm + 1e-12), 0.0)  # of 16 bits it may overflow
        steps = [(parameter, parameter.grad.nan_to_num() * length) for parameter in trained]
        for parameter, step in steps:
            parameter.add_(step)
        return steps
