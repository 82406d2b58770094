"""SimCLR (task=simclr): features without labels, from two views of each image (arXiv 2002.05709).

python src/train.py task=simclr data.views=2 augmentation=resized_crop run_id=features
python src/train.py ckpt_path=features model.freeze=backbone              the linear probe on them
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.runs.errors import UserError
from lockstep.training.task import Task


class SimCLR(Task):
    """Pull the two views of an image together, and apart from those of all other images of the global batch.

    The net's own last layer is the first one of the projection: its features are what that layer gets.

    Args:
        net: (B, C, H, W) float → (B, outputs).
        outputs: width of the hidden layer of the projection.
        dimensions: of the projection.
        temperature: of the softmax over the similarities, above 0.
        parts: as of Task.
    """

    def __init__(
        self, net: nn.Module, *, outputs: int, dimensions: int = 128, temperature: float = 0.5, **parts: Any
    ) -> None:
        super().__init__(net, **parts)
        self.projection = nn.Sequential(nn.ReLU(), nn.Linear(outputs, dimensions))
        self.temperature = temperature

    def training_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> Tensor:
        losses, is_first = self._contrast(batch[0])
        self.count(acc=is_first)
        return losses.mean()

    def _contrast(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each view, and whether its other view is the most similar one."""
        if images.ndim != 5 or images.shape[1] != 2:
            raise UserError("task=simclr needs two views of each image: add data.views=2.")
        outputs = self.projection(self.net(images.transpose(0, 1).flatten(0, 1)))
        found = F.normalize(outputs.to(torch.promote_types(outputs.dtype, torch.float32)), dim=1)
        first, second = found.chunk(2)
        everywhere = torch.cat([self._of_all_ranks(first), self._of_all_ranks(second)])
        mine = torch.arange(len(first), device=found.device) + self.global_rank * len(first)
        half = len(everywhere) // 2
        similarity = found @ everywhere.T / self.temperature
        similarity[torch.arange(len(found)), torch.cat([mine, mine + half])] = -torch.inf  # itself
        other = torch.cat([mine + half, mine])
        return F.cross_entropy(similarity, other, reduction="none"), similarity.argmax(1) == other

    def _of_all_ranks(self, features: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return features
        return self.all_gather(features, sync_grads=True).flatten(0, 1)

    def predict_step(self, batch: Tensor | tuple[Tensor, Any], batch_idx: int) -> Tensor:
        """Return (B, outputs), what the net's last layer gives."""
        return self.net(batch if isinstance(batch, Tensor) else batch[0])
