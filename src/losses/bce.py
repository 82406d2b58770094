"""Binary cross-entropy: each class against all others ("ResNet strikes back", arXiv 2110.00476).

python src/train.py loss=bce
"""

from torch import Tensor
from torch.nn import functional as F

from lockstep.training.losses import WeightedLoss


class BinaryCrossEntropy(WeightedLoss):
    """The mean over the classes; a class's probability is the sigmoid of its logit."""

    def of_each(self, logits: Tensor, shares: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, shares, reduction="none").mean(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()
