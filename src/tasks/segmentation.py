"""Segmentation (task=segmentation): a class for each pixel.

python src/train.py task=segmentation model=unet data=image_folder data.root=DIR data.target=mask
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.process.errors import UserError
from lockstep.training.task import Task


class Segmentation(Task):
    """Train cross-entropy of each pixel.

    Log the pixel accuracy and the mean intersection over union.

    Args:
        net: a net from images (B, C, H, W) float to logits (B, num_classes, h, w). These are
            resized to H × W.
        num_classes: the number of classes. Pixels of class -1 are ignored.
        parts: passed to Task.
    """

    confusion: Tensor

    def __init__(self, net: nn.Module, *, num_classes: int, **parts: Any) -> None:
        super().__init__(net, **parts)
        self.num_classes = num_classes
        # These are the pixels of this rank, true × predicted. Integers stay exact if the module is
        # converted to 16 bits.
        confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        self.register_buffer("confusion", confusion, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        logits = self.net(images)
        _check_maps(logits, self.num_classes)
        return F.interpolate(logits, images.shape[2:], mode="bilinear")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, masks = batch
        losses = F.cross_entropy(self(images), masks, ignore_index=-1, reduction="none")
        # The mean of an image is over its labelled pixels, so that it does not depend on the other
        # images of its rank. The loss of an image without any is 0, not nan.
        num_labelled = (masks >= 0).sum((1, 2)).clamp(min=1)
        return (losses.sum((1, 2)) / num_labelled).mean()

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.confusion.zero_()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, masks = batch
        logits = self(images)
        is_labelled = masks >= 0

        losses = F.cross_entropy(logits, masks, ignore_index=-1, reduction="none")
        self.count(loss=losses[is_labelled])

        predicted = logits.argmax(1)
        cell_indices = masks[is_labelled] * self.num_classes + predicted[is_labelled]
        self.confusion.view(-1).index_add_(0, cell_indices, torch.ones_like(cell_indices))

        num_labelled = is_labelled.sum((1, 2)).clamp(min=1)
        return {"losses": losses.sum((1, 2)) / num_labelled, "predictions": predicted}

    test_step = validation_step

    def evaluation_values(self, stage: str) -> dict[str, float]:
        confusion = self.trainer.strategy.reduce(self.confusion.clone(), reduce_op="sum").double()
        correct = confusion.diag()
        union = confusion.sum(0) + confusion.sum(1) - correct

        # A class that neither occurs nor is predicted has no overlap, and is not in the mean.
        mean_iou = (correct / union)[union > 0].mean()
        return {
            **super().evaluation_values(stage),
            f"{stage}/miou": float(mean_iou),
            f"{stage}/acc": float(correct.sum() / confusion.sum()),
        }

    def predict_step(self, batch: Tensor | tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the class of each pixel, (B, H, W)."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self(images).argmax(1)


def _check_maps(logits: Any, num_classes: int) -> None:
    """Raise UserError if a net does not return a map for each class."""
    if not isinstance(logits, Tensor):
        outputs = f"a {type(logits).__name__}"
    elif logits.ndim != 4 or logits.shape[1] != num_classes:
        outputs = f"outputs of the shape {tuple(logits.shape[1:])} for an image"
    else:
        return
    raise UserError(
        f"task=segmentation needs a net that returns logits (images, {num_classes}, height, "
        f"width), and this one returns {outputs}: give model=unet, or a net of your own."
    )
