"""SimCLR (task=simclr): learn features from two views of each image (arXiv 2002.05709).

python src/train.py task=simclr data.views=2 augmentation=resized_crop run_id=features
python src/train.py ckpt_path=features model.freeze=backbone      (a linear probe on the features)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.process.errors import UserError
from lockstep.training.task import Task


class SimCLR(Task):
    """Train the two views of an image to be similar, and unlike all others of the global batch.

    The last layer of the net is the first layer of the projection. The input of this layer are the
    features. predict_step returns its output.

    Args:
        net: a net from images (B, C, H, W) float to (B, outputs).
        outputs: the width of the projection's hidden layer.
        dimensions: the size of the projected features.
        temperature: the temperature of the softmax over the cosine similarities, above 0.
        parts: passed to Task.
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        outputs: int,
        dimensions: int = 128,
        temperature: float = 0.5,
        **parts: Any,
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

        # Rows of `features`: the first views of this rank's images, then their second views.
        views = images.transpose(0, 1).flatten(0, 1)
        outputs = self.projection(self.net(views))
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        features = F.normalize(outputs.to(dtype), dim=1)

        # Columns of `similarity`: the first views of all ranks, then the second views of all ranks.
        first, second = features.chunk(2)
        all_features = torch.cat([self._gather_from_ranks(first), self._gather_from_ranks(second)])
        similarity = features @ all_features.T / self.temperature

        offset = self.global_rank * len(first)
        first_columns = torch.arange(len(first), device=features.device) + offset
        second_columns = first_columns + len(all_features) // 2
        same_view = torch.cat([first_columns, second_columns])
        other_view = torch.cat([second_columns, first_columns])

        # A view is not compared with itself.
        similarity[torch.arange(len(features)), same_view] = -torch.inf
        losses = F.cross_entropy(similarity, other_view, reduction="none")
        return losses, similarity.argmax(1) == other_view

    def _gather_from_ranks(self, features: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return features
        return self.all_gather(features, sync_grads=True).flatten(0, 1)

    def predict_step(self, batch: Tensor | tuple[Tensor, Any], batch_idx: int) -> Tensor:
        """Return (B, outputs), the output of the net's last layer."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self.net(images)
