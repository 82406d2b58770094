"""Cross-entropy of the softmax.

python src/train.py loss=cross_entropy loss.label_smoothing=0.1 loss.class_weights=auto
"""

from torch import Tensor

from losses.weighted import WeightedLoss


class CrossEntropy(WeightedLoss):
    def of_each(self, logits: Tensor, shares: Tensor) -> Tensor:
        return -(shares * logits.log_softmax(1)).sum(1)
