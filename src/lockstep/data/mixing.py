"""Mixup and CutMix of pairs of images: 2i and 2i + 1 in the order of the epoch, independent of the number of ranks.

Mixup: https://arxiv.org/abs/1710.09412, CutMix: https://arxiv.org/abs/1905.04899. The random numbers are drawn for the
whole epoch at once, so that those of a pair depend only on (seed, epoch, position).
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Mixing:
    """Options of mixup and CutMix."""

    mixup_alpha: float  # of Beta(alpha, alpha); 0: no mixup
    cutmix_alpha: float
    prob: float = 1.0  # that a pair is mixed
    switch_prob: float = 0.5  # of CutMix instead of mixup if both are enabled
    epochs: int | None = None  # mix only in the first so many epochs; None: in all

    def draw(self, generator: np.random.Generator, num_pairs: int, image_size: int) -> np.ndarray:
        """Draw the mixing of all pairs of an epoch.

        Returns:
            (6, num_pairs) float64. Row 0: weight of an image's own label; row 1: weight of its own pixels outside the
            box; rows 2 to 5: top, bottom, left and right of the box whose pixels come from the other image.
        """
        mixed, cuts = generator.random((2, num_pairs))
        own, outside = (
            generator.beta(alpha, alpha, num_pairs) if alpha else np.ones(num_pairs)
            for alpha in (self.mixup_alpha, self.cutmix_alpha)
        )  # fmt: skip
        centre = generator.integers(0, image_size, (2, num_pairs))
        is_cut = cuts < self.switch_prob if self.mixup_alpha and self.cutmix_alpha else self.cutmix_alpha > 0
        half = (np.sqrt(1 - np.where(is_cut, outside, 1)) * image_size / 2).astype(np.int64)
        first, end = np.maximum(centre - half, 0), np.minimum(centre + half, image_size)
        share = np.where(is_cut, 1 - np.prod(end - first, axis=0) / image_size**2, own)
        drawn = np.stack([share, np.where(is_cut, 1, own), first[0], end[0], first[1], end[1]])
        return np.where(mixed < self.prob, drawn, np.array([[1.0], [1], [0], [0], [0], [0]]))


def mix(images: Tensor, labels: Tensor, drawn: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return images mixed in pairs, and soft targets (B, num_classes) float32.

    Args:
        images: (B, C, H, W) float, B even.
        labels: class indices (B,) int64, or multi-label targets (B, num_classes) float32.
        drawn: (6, B/2) float, the columns of Mixing.draw for these pairs.
    """
    share, blend = drawn[:2].float().view(2, -1, 1, 1)
    top, bottom, left, right = drawn[2:].long()[..., None]
    rows, columns = (torch.arange(side, device=images.device) for side in images.shape[-2:])
    inside = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]
    pairs, blend = images.unflatten(0, (-1, 2)), blend[..., None, None]
    mixed = torch.where(inside[:, None, None], pairs.flip(1), pairs * blend + pairs.flip(1) * (1 - blend))
    targets = (labels if labels.ndim == 2 else F.one_hot(labels, num_classes).float()).unflatten(0, (-1, 2))
    return mixed.flatten(0, 1), (targets * share + targets.flip(1) * (1 - share)).flatten(0, 1)
