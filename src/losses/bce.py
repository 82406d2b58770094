"""Binary cross-entropy of each class ("ResNet strikes back", arXiv 2110.00476).

python src/train.py loss=bce
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.process.errors import UserError
from losses.cross_entropy import CrossEntropy


class BinaryCrossEntropy(CrossEntropy):
    """The mean of the binary cross-entropy over the classes.

    The probability of a class is the sigmoid of its logit.

    Args:
        target_threshold: in training the target of a class is 1 if its share in a mixed image is
            larger than this number, otherwise 0; None: the shares are the targets.
    """

    def __init__(
        self,
        num_classes: int,
        class_counts: Sequence[int],
        target_threshold: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_classes, class_counts, **options)
        if target_threshold is not None and not 0 <= target_threshold < 1:
            raise UserError(
                f"loss.target_threshold={target_threshold}: give a number from 0 to below 1, or "
                "null."
            )
        self.target_threshold = target_threshold

    def training_targets(self, shares: Tensor) -> Tensor:
        if self.target_threshold is None:
            return shares
        return (shares > self.target_threshold).to(shares.dtype)

    def of_each(self, logits: Tensor, shares: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, shares, reduction="none").mean(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        # In 16 bits all logits from about 6 on would have the probability 1.
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).sigmoid()
