"""Augmentations of single images: a random part of the image, then what torchvision's policies do to it."""

from collections.abc import Sequence
from typing import Any

from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from lockstep.data.augmentation import Augmentation, Operation
from lockstep.data.framing import INTERPOLATIONS, Framing
from lockstep.runs.errors import UserError

MAGNITUDES = 31  # of RandAugment, from 0
PADDING, BLUR, SIGMA = 4, 13, (0.1, 2.0)  # of 3-Augment; the kernel reaches over three of the largest sigmas


class ResizedCrop(Augmentation):
    """A random part of the image, resized: what ImageNet recipes begin with (https://arxiv.org/abs/1409.4842).

    Args:
        scale: least and greatest share of the image's area; None: the whole image by data.resize, of which a crop with
            data.crop_padding is taken.
        ratio: least and greatest width over height of the part.
        interpolation: bilinear or bicubic; None: as evaluation has it.
    """

    def __init__(
        self, *, scale: Sequence[float] | None = (0.08, 1.0), ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: str | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        for key, pair, most in (("scale", scale, 1.0), ("ratio", ratio, 100.0)):
            if pair is not None and not (len(pair) == 2 and 0 < pair[0] <= pair[1] <= most):
                raise UserError(f"augmentation.{key}={list(pair)} must be two numbers above 0, ascending, to {most:g}.")
        if interpolation not in (None, *INTERPOLATIONS):
            raise UserError(f"augmentation.interpolation={interpolation} must be one of {', '.join(INTERPOLATIONS)}.")
        self.scale, self.ratio, self.interpolation = scale, ratio, interpolation

    def operations(self, framing: Framing) -> list[Operation]:
        flip = [v2.RandomHorizontalFlip()] if self.flips(framing) else []
        return [*self.crop(framing), *flip, *self.policy(framing)]

    def crop(self, framing: Framing) -> list[Operation]:
        """Cut image_size × image_size."""
        if self.scale is None:
            return [framing.square, v2.RandomCrop(framing.image_size, framing.crop_padding or None)]
        mode = InterpolationMode(self.interpolation or framing.interpolation)
        return [v2.RandomResizedCrop(framing.image_size, tuple(self.scale), tuple(self.ratio), mode)]

    def policy(self, framing: Framing) -> list[Operation]:
        """Return what a subclass does to the crop."""
        return []


class RandAugment(ResizedCrop):
    """Some operations of one strength, drawn from fourteen (https://arxiv.org/abs/1909.13719).

    Args:
        num_ops: operations on each image.
        magnitude: their strength, from 0 to 30.
    """

    def __init__(self, *, num_ops: int = 2, magnitude: int = 9, **options: Any) -> None:
        super().__init__(**options)
        if num_ops < 1 or not 0 <= magnitude < MAGNITUDES:
            raise UserError(
                f"augmentation.num_ops={num_ops} must be at least 1 and augmentation.magnitude={magnitude} from 0 to "
                f"{MAGNITUDES - 1}."
            )
        self.num_ops, self.magnitude = num_ops, magnitude

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.RandAugment(self.num_ops, self.magnitude, MAGNITUDES, fill=framing.fill)]


class TrivialAugment(ResizedCrop):
    """One operation of any strength on each image, nothing to tune (https://arxiv.org/abs/2103.10158)."""

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.TrivialAugmentWide(fill=framing.fill)]


class AutoAugment(ResizedCrop):
    """Pairs of operations as a search found them (https://arxiv.org/abs/1805.09501).

    Args:
        found_on: the data set of the search: imagenet, cifar10 or svhn.
    """

    def __init__(self, *, found_on: str = "imagenet", **options: Any) -> None:
        super().__init__(**options)
        found = [policy.value for policy in AutoAugmentPolicy]
        if found_on not in found:
            raise UserError(f"augmentation.found_on={found_on} must be one of {', '.join(found)}.")
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
        resize = v2.Resize(framing.image_size, framing.interpolation_mode)
        return [framing.trimmed, resize, v2.RandomCrop(framing.image_size, PADDING, padding_mode="reflect")]

    def policy(self, framing: Framing) -> list[Operation]:
        """
        Raises:
            UserError: the images are smaller than the blur reaches.
        """
        if framing.image_size <= BLUR // 2:
            raise UserError(
                f"augmentation=three_augment blurs over {BLUR} pixels: data.image_size={framing.image_size} must be at "
                f"least {BLUR // 2 + 1}."
            )
        grey = v2.Grayscale(framing.channels)
        return [v2.RandomChoice([grey, v2.RandomSolarize(128, p=1), v2.GaussianBlur(BLUR, SIGMA)])]
