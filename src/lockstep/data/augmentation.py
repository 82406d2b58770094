"""The base of src/augmentations/, crop and flip on the device, and mixing of pairs of images.

Mixup: https://arxiv.org/abs/1710.09412, CutMix: https://arxiv.org/abs/1905.04899. They mix images
2i and 2i + 1 in the order of the epoch. The random numbers of a whole epoch are drawn at once, so
those of a pair depend only on (seed, epoch, position).
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
from lockstep.process.errors import UserError

Operation = Callable[[Any], Any]

# The columns of Mixing.draw for a pair that is not mixed.
UNMIXED = np.array([[1.0], [1], [0], [0], [0], [0]])


def check_option(option: str, value: Any, is_valid: bool, requirement: str) -> None:
    if not is_valid:
        raise UserError(f"augmentation.{option}={value} must be {requirement}.")


@dataclass(frozen=True)
class Mixing:
    """Options of mixup and CutMix.

    Args:
        mixup_alpha: shares are drawn from Beta(alpha, alpha); 0: no mixup.
        cutmix_alpha: the same for CutMix.
        prob: the share of the pairs that are mixed.
        epochs: the number of first epochs in which pairs are mixed; None: all epochs.
    """

    mixup_alpha: float
    cutmix_alpha: float
    prob: float = 1.0
    epochs: int | None = None

    def draw(self, generator: np.random.Generator, num_pairs: int, image_size: int) -> np.ndarray:
        """Draw the mixing of all pairs of an epoch.

        Returns:
            (6, num_pairs) float64. Row 0 is the weight of an image's own label. Row 1 is the weight
            of its own pixels outside the box. Rows 2 to 5 are top, bottom, left and right of the
            box, whose pixels come from the other image.
        """
        # Another order of these draws would change the pixels of every run.
        mix_draw, cut_draw = generator.random((2, num_pairs))
        mixup_share = _draw_beta(generator, self.mixup_alpha, num_pairs)
        cutmix_share = _draw_beta(generator, self.cutmix_alpha, num_pairs)
        centre = generator.integers(0, image_size, (2, num_pairs))
        is_cut = self._is_cut(cut_draw)

        # A box that lies wholly inside the image has the share (1 - share) of its area.
        box_share = 1 - np.where(is_cut, cutmix_share, 1)
        half = (np.sqrt(box_share) * image_size / 2).astype(np.int64)
        first = np.maximum(centre - half, 0)
        end = np.minimum(centre + half, image_size)
        outside_box = 1 - np.prod(end - first, axis=0) / image_size**2

        share = np.where(is_cut, outside_box, mixup_share)
        blend = np.where(is_cut, 1, mixup_share)
        mixing = np.stack([share, blend, first[0], end[0], first[1], end[1]])
        return np.where(mix_draw < self.prob, mixing, UNMIXED)

    def _is_cut(self, uniform: np.ndarray) -> np.ndarray | bool:
        """Return which pairs CutMix mixes. With mixup it is a random half of them."""
        if self.mixup_alpha and self.cutmix_alpha:
            return uniform < 0.5
        return self.cutmix_alpha > 0


def _draw_beta(generator: np.random.Generator, alpha: float, num_pairs: int) -> np.ndarray:
    """Draw from Beta(alpha, alpha). For alpha 0 return ones without a draw."""
    if not alpha:
        return np.ones(num_pairs)
    return generator.beta(alpha, alpha, num_pairs)


def mix(images: Tensor, labels: Tensor, mixing: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return images mixed in pairs, and soft targets (B, num_classes) float32.

    Args:
        images: (B, C, H, W) float, B even.
        labels: class indices (B,) int64, or multi-label targets (B, num_classes) float32.
        mixing: (6, B/2) float, the columns of Mixing.draw for these pairs.
    """
    share, blend = mixing[:2].float().view(2, -1, 1, 1)
    is_in_box = _mark_boxes(mixing[2:], images)[:, None, None]

    # (B/2, 2, …): both images of a pair, and the other image for each of them.
    pairs = images.unflatten(0, (-1, 2))
    others = pairs.flip(1)
    blend = blend[..., None, None]
    mixed = torch.where(is_in_box, others, pairs * blend + others * (1 - blend))

    if labels.ndim != 2:
        labels = F.one_hot(labels, num_classes).float()
    targets = labels.unflatten(0, (-1, 2))
    # A label that is not known is nan, and stays out of pairs that are not mixed.
    others_targets = torch.where(share < 1, targets.flip(1), 0.0)
    soft_targets = targets * share + others_targets * (1 - share)
    return mixed.flatten(0, 1), soft_targets.flatten(0, 1)


def _mark_boxes(bounds: Tensor, images: Tensor) -> Tensor:
    """Return (B/2, H, W) bool: the pixels in the box of each pair.

    Args:
        bounds: (4, B/2) top, bottom, left and right.
    """
    top, bottom, left, right = bounds.long()[..., None]
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    is_in_rows = (rows >= top) & (rows < bottom)
    is_in_columns = (columns >= left) & (columns < right)
    return is_in_rows[:, :, None] & is_in_columns[:, None]


class Augmentation:
    """Operations on single images, and mixing of pairs.

    A subclass overrides `operations`, or one part of them: `crop` or `policy`.

    Args:
        flip: mirror half of the images left to right; None: as data.flip says.
        color_jitter: up to four numbers, the largest change of brightness, contrast, saturation and
            hue; None: colours do not change.
        erasing_prob: the share of the images in which a rectangle becomes the mean colour.
        mixup_alpha, cutmix_alpha: see Mixing.
        mix_prob, mix_epochs: `prob` and `epochs` of Mixing.
    """

    # Whether the device augments whole batches. Otherwise workers augment single images.
    is_of_batches = False
    # Whether `policy` changes colours. Images with other channels than pictures have none.
    changes_colours = False
    random_crop = True

    def __init__(
        self,
        *,
        flip: bool | None = None,
        color_jitter: Sequence[float] | None = None,
        erasing_prob: float = 0.0,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        mix_prob: float = 1.0,
        mix_epochs: int | None = None,
    ) -> None:
        check_option("mix_prob", mix_prob, 0 <= mix_prob <= 1, "from 0 to 1")
        is_valid = mixup_alpha >= 0 and cutmix_alpha >= 0
        check_option(
            "mixup_alpha", f"{mixup_alpha} and cutmix_alpha={cutmix_alpha}", is_valid, "from 0"
        )

        is_valid = color_jitter is None or isinstance(color_jitter, list | tuple)
        check_option("color_jitter", color_jitter, is_valid, "up to four numbers, as [0.4,0.4,0.4]")

        self.flip = flip
        self.color_jitter = list(color_jitter or ())
        self.erasing_prob = erasing_prob
        self.mixing: Mixing | None = None
        if mixup_alpha > 0 or cutmix_alpha > 0:
            self.mixing = Mixing(mixup_alpha, cutmix_alpha, mix_prob, mix_epochs)

    def operations(self, framing: Framing) -> list[Operation]:
        """Return the operations that make image_size × image_size pixels of a Pillow image.

        The image is RGB or L, and may have any size. The operations draw only from torch's
        generator, which is seeded for each image.
        """
        operations = self.crop(framing)
        if self.flips(framing):
            operations.append(v2.RandomHorizontalFlip())
        return [*operations, *self.policy(framing)]

    def crop(self, framing: Framing) -> list[Operation]:
        """Return the crop of image_size at a random position of the resized image.

        It may reach over the border by data.crop_padding pixels.
        """
        fill = {Mask: VOID, "others": 0}
        padding = framing.crop_padding or None
        return [
            v2.Lambda(framing.square),
            v2.RandomCrop(framing.image_size, padding, fill=fill),
        ]

    def policy(self, framing: Framing) -> list[Operation]:
        """Return the operations after the crop and the flip."""
        return []

    def flips(self, framing: Framing) -> bool:
        return framing.flip if self.flip is None else self.flip

    def pipeline(self, framing: Framing) -> v2.Compose:
        """Return all operations on one image, in order.

        Raises:
            UserError: an option is out of its range, or changes colours of images that have
                neither one channel nor three.
        """
        if framing.channels not in (1, 3) and (self.changes_colours or self.color_jitter):
            raise UserError(
                "this augmentation changes colours, and the images have "
                f"{framing.channels} channels. Take augmentation=crop_flip, resized_crop or none; "
                "flip, erasing_prob, mixup_alpha and cutmix_alpha work, color_jitter does not."
            )

        operations = self.operations(framing)
        # torchvision checks the ranges.
        try:
            if self.color_jitter:
                operations.append(v2.ColorJitter(*self.color_jitter))
            if self.erasing_prob:
                operations.append(v2.RandomErasing(self.erasing_prob, value=framing.fill))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"augmentation: color_jitter={self.color_jitter} "
                f"erasing_prob={self.erasing_prob}: {str(error).rstrip('.')}."
            ) from None
        return v2.Compose(operations)


class CropFlip(Augmentation):
    """A crop of image_size at a random position, mirrored or not.

    data.crop_padding and data.flip are its options.

    Args:
        random_crop: false: the centre crop of evaluation.
        options: passed to Augmentation.
    """

    def __init__(self, *, random_crop: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.random_crop = random_crop
        self.is_of_batches = not (self.color_jitter or self.erasing_prob)

    def crop(self, framing: Framing) -> list[Operation]:
        if self.random_crop:
            return super().crop(framing)
        return [v2.Lambda(framing.square), v2.CenterCrop(framing.image_size)]
