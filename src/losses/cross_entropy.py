"""Cross-entropy of the softmax, and base of the other losses: targets as shares, label smoothing, class weights.

python src/train.py loss=cross_entropy loss.label_smoothing=0.1 loss.class_weights=auto
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.runs.errors import UserError


def weights_of_classes(stated: str | Sequence[float] | None, class_counts: Sequence[int]) -> Tensor:
    """Return (classes,) float64. "auto": images / (classes × images of the class), whose mean over the images is 1.

    Raises:
        UserError: neither auto nor one positive number per class.
    """
    counts = torch.tensor([max(count, 1) for count in class_counts], dtype=torch.float64)
    if stated is None:
        return torch.ones_like(counts)
    if stated == "auto":
        return sum(class_counts) / (len(class_counts) * counts)
    is_list = not isinstance(stated, str) and len(stated) == len(counts)
    if not is_list or not all(isinstance(weight, int | float) and weight > 0 for weight in stated):
        raise UserError(f"loss.class_weights={stated}: give auto, or one positive number for each of {len(counts)}.")
    return torch.tensor(stated, dtype=torch.float64)


class CrossEntropy(nn.Module):
    """A loss with label smoothing and class weights in training but not in evaluation, so that recipes are comparable.

    A subclass changes `of_each` and, if its probabilities are not the softmax, `probabilities`.

    Args:
        num_classes: the number of classes of the data.
        class_counts: training images of each class.
        label_smoothing: share of a target that is spread over all classes, from 0 to 1.
        class_weights: None, auto (inverse to the number of training images), or one number per class.
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
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.is_weighted = class_weights is not None
        self.register_buffer("weights", weights_of_classes(class_weights, class_counts), persistent=False)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return (B,), the loss of each image.

        Args:
            logits: (B, classes).
            targets: classes (B,) int64, or shares of the classes (B, classes).
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        classes = torch.arange(self.num_classes, device=targets.device)
        shares = (targets if targets.ndim == 2 else targets[:, None] == classes).to(logits.dtype)
        if not self.training:
            return self.of_each(logits, shares)
        smoothing = self.label_smoothing
        loss = self.of_each(logits, shares * (1 - smoothing) + smoothing / self.num_classes)
        return loss * (shares @ self.weights.to(logits.dtype)) if self.is_weighted else loss

    def of_each(self, logits: Tensor, shares: Tensor) -> Tensor:
        """Return (B,), the loss of each image, from logits and shares (B, classes)."""
        return -(shares * logits.log_softmax(1)).sum(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)
