"""Focal loss: cross-entropy in which well classified images count less (arXiv 1708.02002).

python src/train.py loss=focal loss.gamma=2
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.process.errors import UserError
from losses.cross_entropy import CrossEntropy


class Focal(CrossEntropy):
    """Cross-entropy in which a class counts less the more probable the net finds it.

    Args:
        gamma: the exponent of the factor (1 - probability) of each class; 0 is cross-entropy.
        options: passed to CrossEntropy.
    """

    def __init__(
        self,
        num_classes: int,
        class_counts: Sequence[int],
        gamma: float = 2.0,
        **options: Any,
    ) -> None:
        super().__init__(num_classes, class_counts, **options)
        if gamma < 0:
            raise UserError(f"loss.gamma={gamma}: give a number from 0 on.")
        self.gamma = gamma

    def of_each(self, logits: Tensor, shares: Tensor) -> Tensor:
        log_probabilities = logits.log_softmax(1)
        # A probability of 1 would give a gradient of nan if gamma is below 1.
        eps = torch.finfo(log_probabilities.dtype).eps
        factor = (-torch.expm1(log_probabilities)).clamp(min=eps) ** self.gamma
        return -(shares * factor * log_probabilities).sum(1)
