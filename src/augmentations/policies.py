"""Augmentations of single images: a random resized crop, then a policy of torchvision."""

from collections.abc import Sequence
from typing import Any

from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from lockstep.data.augmentation import Augmentation, Operation, check
from lockstep.data.framing import Framing
from lockstep.runs.errors import UserError

MAGNITUDES = 31  # of RandAugment, from 0
PADDING, BLUR, SIGMA = 4, 13, (0.1, 2.0)  # of 3-Augment; the kernel reaches over three of the largest sigmas


class ResizedCrop(Augmentation):
    """A random resized crop, as in ImageNet recipes (https://arxiv.org/abs/1409.4842).

    Args:
        scale: smallest and largest share of the image's area; None: the crop of data.resize and data.crop_padding.
    """

    def __init__(self, *, scale: Sequence[float] | None = (0.08, 1.0), **options: Any) -> None:
        super().__init__(**options)
        is_valid = scale is None or (len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1)
        check("scale", scale, is_valid, "two numbers above 0, ascending, to 1")
        self.scale = scale

    def crop(self, framing: Framing) -> list[Operation]:
        if self.scale is None:
            return super().crop(framing)
        mode = InterpolationMode(framing.interpolation)
        return [v2.RandomResizedCrop(framing.image_size, tuple(self.scale), interpolation=mode)]


class RandAugment(ResizedCrop):
    """`num_ops` operations of strength `magnitude` (0 to 30), of fourteen (https://arxiv.org/abs/1909.13719)."""

    def __init__(self, *, num_ops: int = 2, magnitude: int = 9, **options: Any) -> None:
        super().__init__(**options)
        check("num_ops", num_ops, num_ops >= 1, "at least 1")
        check("magnitude", magnitude, 0 <= magnitude < MAGNITUDES, f"from 0 to {MAGNITUDES - 1}")
        self.num_ops, self.magnitude = num_ops, magnitude

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.RandAugment(self.num_ops, self.magnitude, MAGNITUDES, fill=framing.fill)]


class TrivialAugment(ResizedCrop):
    """One operation of random strength on each image, without parameters to tune (https://arxiv.org/abs/2103.10158)."""

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.TrivialAugmentWide(fill=framing.fill)]


class AutoAugment(ResizedCrop):
    """Pairs of operations found by a search on imagenet, cifar10 or svhn (https://arxiv.org/abs/1805.09501)."""

    def __init__(self, *, found_on: str = "imagenet", **options: Any) -> None:
        super().__init__(**options)
        names = [policy.value for policy in AutoAugmentPolicy]
        check("found_on", found_on, found_on in names, f"one of {', '.join(names)}")
        self.found_on = AutoAugmentPolicy(found_on)

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.AutoAugment(self.found_on, fill=framing.fill)]


class ThreeAugment(ResizedCrop):
    """The 3-Augment of DeiT III: grey, solarised or blurred, then jitter (https://arxiv.org/abs/2204.07118).

    Where `scale` is None it is the paper's simple random crop: the short side to image_size, four mirrored pixels.
    """

    def __init__(
        self, *, scale: Sequence[float] | None = None, color_jitter: Sequence[float] | None = (0.3,) * 3, **options: Any
    ) -> None:
        super().__init__(scale=scale, color_jitter=color_jitter, **options)

    def crop(self, framing: Framing) -> list[Operation]:
        if self.scale is not None:
            return super().crop(framing)
        resize = v2.Resize(framing.image_size, InterpolationMode(framing.interpolation))
        return [v2.Lambda(framing.trimmed), resize, v2.RandomCrop(framing.image_size, PADDING, padding_mode="reflect")]

    def policy(self, framing: Framing) -> list[Operation]:
        if framing.image_size <= BLUR // 2:  # torchvision names neither the option nor the augmentation
            size = f"data.image_size={framing.image_size} must be at least {BLUR // 2 + 1}"
            raise UserError(f"augmentation=three_augment blurs over {BLUR} pixels: {size}.")
        grey = v2.Grayscale(framing.channels)
        return [v2.RandomChoice([grey, v2.RandomSolarize(128, p=1), v2.GaussianBlur(BLUR, SIGMA)])]
