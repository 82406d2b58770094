"""Cross-entropy of the softmax, and the base class of the other losses.

It has label smoothing and class weights. Targets may be shares of classes.

python src/train.py loss=cross_entropy loss.label_smoothing=0.1 loss.class_weights=auto
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.process.errors import UserError


def weights_of_classes(
    class_weights: str | Sequence[float] | None, class_counts: Sequence[int]
) -> Tensor:
    """Return the weight of each class, (classes,) float64.

    "auto" is images / (classes × images of the class), whose mean over the images is 1.

    Raises:
        UserError: class_weights is neither auto nor one positive number per class.
    """
    counts = torch.tensor([max(count, 1) for count in class_counts], dtype=torch.float64)
    if class_weights is None:
        return torch.ones_like(counts)
    if class_weights == "auto":
        return sum(class_counts) / (len(class_counts) * counts)

    if not _is_one_positive_number_per_class(class_weights, len(counts)):
        raise UserError(
            f"loss.class_weights={class_weights}: give auto, or one positive number "
            f"for each of {len(counts)}."
        )
    return torch.tensor(class_weights, dtype=torch.float64)


def _is_one_positive_number_per_class(class_weights: object, num_classes: int) -> bool:
    if not isinstance(class_weights, list | tuple) or len(class_weights) != num_classes:
        return False
    return all(isinstance(weight, int | float) and weight > 0 for weight in class_weights)


class CrossEntropy(nn.Module):
    """A loss with label smoothing and class weights in training.

    An evaluation uses neither, so that recipes are comparable. A subclass overrides `of_each`. If
    its probabilities are not the softmax, it also overrides `probabilities`.

    Args:
        num_classes: the number of classes of the data.
        class_counts: the number of training images of each class.
        label_smoothing: the share of a target that is spread over all classes, from 0 to 1.
        class_weights: auto (inverse to the number of training images), one number per class, or
            None: all classes have the same weight.
    """

    weights: Tensor

    def __init__(
        self,
        num_classes: int,
        class_counts: Sequence[int],
        label_smoothing: float = 0.0,
        class_weights: str | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"loss.label_smoothing={label_smoothing}: give a number from 0 to 1.")

        self.num_classes = num_classes
        self.label_smoothing = label_smoothing
        self.is_weighted = class_weights is not None
        weights = weights_of_classes(class_weights, class_counts)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image, (B,).

        Args:
            logits: (B, classes).
            targets: classes (B,) int64, or shares of the classes (B, classes).
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shares = self._shares(targets).to(logits.dtype)
        if not self.training:
            return self.of_each(logits, shares)

        smoothing = self.label_smoothing
        targets = self.training_targets(shares)
        smooth_targets = targets * (1 - smoothing) + smoothing / self.num_classes
        loss = self.of_each(logits, smooth_targets)
        if self.is_weighted:
            loss = loss * (shares @ self.weights.to(logits.dtype))
        return loss

    def _shares(self, targets: Tensor) -> Tensor:
        """Return shares of the classes (B, classes). A class becomes one-hot."""
        if targets.ndim == 2:
            return targets
        classes = torch.arange(self.num_classes, device=targets.device)
        return targets[:, None] == classes

    def training_targets(self, shares: Tensor) -> Tensor:
        """Return the targets of a training. Class weights still follow the shares."""
        return shares

    def of_each(self, logits: Tensor, shares: Tensor) -> Tensor:
        """Return the loss of each image, (B,), from logits and shares (B, classes)."""
        return -(shares * logits.log_softmax(1)).sum(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        # In bfloat16 all probabilities near 1 would be 1.
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(1)
