"""The base of src/augmentations/, the crop and flip that the device does to whole batches, and mixing of pairs.

Mixup: https://arxiv.org/abs/1710.09412, CutMix: https://arxiv.org/abs/1905.04899. They mix images 2i and 2i + 1 in the
order of the epoch. The random numbers are drawn for the whole epoch at once, so that those of a pair depend only on
(seed, epoch, position).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask

from lockstep.data.framing import VOID, Framing
from lockstep.runs.errors import UserError

Operation = Callable[[Any], Any]


def check(option: str, value: Any, is_valid: bool, requirement: str) -> None:
    if not is_valid:
        raise UserError(f"augmentation.{option}={value} must be {requirement}.")


@dataclass(frozen=True)
class Mixing:
    """Options of mixup and CutMix."""

    mixup_alpha: float  # of Beta(alpha, alpha); 0: no mixup
    cutmix_alpha: float
    prob: float = 1.0  # that a pair is mixed
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
        is_cut = cuts < 0.5 if self.mixup_alpha and self.cutmix_alpha else self.cutmix_alpha > 0
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


class Augmentation:
    """Operations on single images, and mixing of pairs; a subclass returns other `operations`, or another part of them.

    Args:
        flip: mirror half of the images left to right; None: as data.flip says.
        color_jitter: up to four numbers, the largest change of brightness, contrast, saturation and hue; None: none.
        erasing_prob: share of the images in which a rectangle becomes the mean colour.
        mixup_alpha …: as of Mixing.
    """

    def __init__(
        self, *, flip: bool | None = None, color_jitter: Sequence[float] | None = None, erasing_prob: float = 0.0,
        mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, mix_prob: float = 1.0,
        mix_epochs: int | None = None,
    ) -> None:  # fmt: skip
        check("mix_prob", mix_prob, 0 <= mix_prob <= 1, "from 0 to 1")
        alphas = mixup_alpha, cutmix_alpha
        check("mixup_alpha", f"{mixup_alpha} and cutmix_alpha={cutmix_alpha}", min(alphas) >= 0, "from 0")
        self.flip, self.color_jitter, self.erasing_prob = flip, list(color_jitter or ()), erasing_prob
        self.mixing = Mixing(*alphas, mix_prob, mix_epochs) if max(alphas) > 0 else None

    def operations(self, framing: Framing) -> list[Operation]:
        """Return operations from a Pillow image of any size, RGB or L, to one of image_size × image_size.

        They draw from torch's generator alone, which is seeded for each image.
        """
        flip = [v2.RandomHorizontalFlip()] if self.flips(framing) else []
        return [*self.crop(framing), *flip, *self.policy(framing)]

    def crop(self, framing: Framing) -> list[Operation]:
        """Return the crop of image_size at a random position of the resized image, as data.crop_padding says."""
        fill = {Mask: VOID, "others": 0}
        return [v2.Lambda(framing.square), v2.RandomCrop(framing.image_size, framing.crop_padding or None, fill=fill)]

    def policy(self, framing: Framing) -> list[Operation]:
        """Return what follows the crop and the flip."""
        return []

    def flips(self, framing: Framing) -> bool:
        return framing.flip if self.flip is None else self.flip

    def pipeline(self, framing: Framing) -> v2.Compose:
        """Return all operations on one image, in order.

        Raises:
            UserError: an option is out of its range, or the images have neither one channel nor three.
        """
        if framing.channels not in (1, 3):
            raise UserError(
                f"this augmentation works on colour or grey images, and these have {framing.channels} channels: take "
                "augmentation=crop_flip or augmentation=none, without color_jitter and erasing_prob."
            )
        found = self.operations(framing)
        try:
            if self.color_jitter:
                found.append(v2.ColorJitter(*self.color_jitter))
            if self.erasing_prob:
                found.append(v2.RandomErasing(self.erasing_prob, value=framing.fill))
        except (TypeError, ValueError) as error:  # torchvision checks the ranges
            values = f"color_jitter={self.color_jitter} erasing_prob={self.erasing_prob}"
            raise UserError(f"augmentation: {values}: {str(error).rstrip('.')}.") from None
        return v2.Compose(found)


class CropFlip(Augmentation):
    """A crop of image_size at a random position, mirrored or not, as data.crop_padding and data.flip say.

    Args:
        random_crop: false: the centre crop of evaluation.
    """

    def __init__(self, *, random_crop: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.random_crop = random_crop

    def crop(self, framing: Framing) -> list[Operation]:
        if self.random_crop:
            return super().crop(framing)
        return [v2.Lambda(framing.square), v2.CenterCrop(framing.image_size)]
