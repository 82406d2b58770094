"""Multi-label classification (task=multilabel): any number of labels for each image, 0 or 1.

python src/train.py task=multilabel data=csv data.root=FILE.csv 'data.label_columns=[cat,dog]'
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MultilabelAveragePrecision

from lockstep.process.errors import UserError
from lockstep.training.task import Task
from tasks.classifier import check_logits

# torchmetrics ignores this label.
UNKNOWN = -1


class MultiLabel(Task):
    """Train binary cross-entropy of each label. Log mean average precision and accuracy.

    A label that is nan is not known. It does not count in the loss and the metrics.

    Args:
        net: a net from images (B, C, H, W) float to logits (B, num_classes).
        num_classes: the number of labels.
        positive_weight: the weight of a present label relative to an absent one. It should be above
            1 for rare labels.
        parts: passed to Task.
    """

    def __init__(
        self, net: nn.Module, *, num_classes: int, positive_weight: float = 1.0, **parts: Any
    ) -> None:
        super().__init__(net, **parts)
        if num_classes < 2:
            raise UserError(
                "task=multilabel needs two labels or more: for one of them take task=classifier."
            )
        self.num_classes = num_classes
        self.register_buffer("pos_weight", torch.tensor(positive_weight), persistent=False)
        self.average_precision = MultilabelAveragePrecision(
            num_classes, average=None, ignore_index=UNKNOWN
        )
        # The number of images with each label.
        self.register_buffer("label_counts", torch.zeros(num_classes), persistent=False)

    def setup(self, stage: str) -> None:
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "refuse_labels_outside"):
            data.refuse_labels_outside(0, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, targets = batch
        logits = self.net(images)
        check_logits(logits, self.num_classes)
        losses = losses_of_labels(logits, targets, self.pos_weight)
        # The mean of an image is over its known labels, so that it does not depend on the other
        # images of its rank. The loss of an image without any is 0, not nan.
        num_known = (~targets.isnan()).sum(1).clamp(min=1)
        return (losses.sum(1) / num_known).mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        images, targets = batch
        if ((targets < 0) | (targets > 1)).any():
            labels = targets[~targets.isnan()]
            raise UserError(
                f"task=multilabel takes labels from 0 to 1, and one is {labels.min()} or "
                f"{labels.max()}."
            )
        logits = self.net(images)
        is_known = ~targets.isnan()
        losses = losses_of_labels(logits, targets)
        is_present = targets > 0.5
        self.count(loss=losses[is_known], acc=((logits > 0) == is_present)[is_known])
        # torchmetrics takes a batch of logits that all lie in [0, 1] for probabilities.
        probabilities = probabilities_of_labels(logits)
        self.average_precision.update(probabilities, is_present.long().where(is_known, UNKNOWN))
        self.label_counts += is_present.sum(0)
        num_known = is_known.sum(1).clamp(min=1)
        return {"losses": losses.sum(1) / num_known, "predictions": probabilities}

    test_step = validation_step

    def evaluation_values(self, stage: str) -> dict[str, float]:
        """Add the mean average precision over the labels that occur."""
        occurs = self.trainer.strategy.reduce(self.label_counts.clone(), reduce_op="sum") > 0
        precision = self.average_precision.compute()[occurs].mean()
        self.average_precision.reset()
        self.label_counts.zero_()
        return {**super().evaluation_values(stage), f"{stage}/map": float(precision)}

    def predict_step(self, batch: Tensor | tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return probabilities (B, num_classes)."""
        return probabilities_of_labels(self.net(batch if isinstance(batch, Tensor) else batch[0]))


def probabilities_of_labels(logits: Tensor) -> Tensor:
    """Return the sigmoid in 32 bits or more.

    In 16 bits all logits from about 6 on would have the probability 1, and no order.
    """
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()


def losses_of_labels(logits: Tensor, labels: Tensor, pos_weight: Tensor | None = None) -> Tensor:
    """Return the loss of each label, (B, C). It is 0 if the label is nan, which means not known.

    Args:
        logits, labels: (B, C).
        pos_weight: the weight of a present label relative to an absent one.
    """
    targets = labels.nan_to_num(0.0)
    losses = F.binary_cross_entropy_with_logits(
        logits, targets, reduction="none", pos_weight=pos_weight
    )
    return losses.where(~labels.isnan(), 0.0)
