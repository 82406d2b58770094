"""Augmentations of single images: a random resized crop, then a policy of torchvision."""

from collections.abc import Sequence
from typing import Any

from torchvision.transforms import AutoAugmentPolicy, InterpolationMode, v2

from lockstep.data.augmentation import Augmentation, Operation, check_option
from lockstep.data.framing import Framing
from lockstep.process.errors import UserError

# RandAugment counts its strengths from 0.
MAGNITUDES = 31

# The values of the 3-Augment paper; the kernel reaches over three of the largest sigmas.
PADDING = 4  # pixels
BLUR_KERNEL = 13  # pixels
SIGMA = (0.1, 2.0)  # pixels


class ResizedCrop(Augmentation):
    """A random resized crop, as in ImageNet recipes (https://arxiv.org/abs/1409.4842).

    Args:
        scale: smallest and largest share of the image's area; None: the crop of data.resize and
            data.crop_padding.
        options: passed to Augmentation.
    """

    def __init__(self, *, scale: Sequence[float] | None = (0.08, 1.0), **options: Any) -> None:
        super().__init__(**options)
        is_pair = isinstance(scale, list | tuple) and len(scale) == 2
        is_valid = scale is None or (is_pair and 0 < scale[0] <= scale[1] <= 1)
        check_option("scale", scale, is_valid, "two numbers above 0, ascending, to 1")
        self.scale = scale

    def crop(self, framing: Framing) -> list[Operation]:
        if self.scale is None:
            return super().crop(framing)

        mode = InterpolationMode(framing.interpolation)
        scale = tuple(self.scale)
        return [v2.RandomResizedCrop(framing.image_size, scale, interpolation=mode)]


class RandAugment(ResizedCrop):
    """Random operations of one strength, out of fourteen (https://arxiv.org/abs/1909.13719).

    Args:
        num_ops: operations on each image.
        magnitude: strength of each operation, from 0 to 30.
        options: passed to ResizedCrop.
    """

    changes_colours = True

    def __init__(self, *, num_ops: int = 2, magnitude: int = 9, **options: Any) -> None:
        super().__init__(**options)
        check_option("num_ops", num_ops, num_ops >= 1, "at least 1")
        highest = MAGNITUDES - 1
        check_option("magnitude", magnitude, 0 <= magnitude <= highest, f"from 0 to {highest}")
        self.num_ops = num_ops
        self.magnitude = magnitude

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.RandAugment(self.num_ops, self.magnitude, MAGNITUDES, fill=framing.fill)]


class TrivialAugment(ResizedCrop):
    """One operation of random strength on each image, without parameters to tune.

    Source: https://arxiv.org/abs/2103.10158
    """

    changes_colours = True

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.TrivialAugmentWide(fill=framing.fill)]


class AutoAugment(ResizedCrop):
    """Pairs of operations found by a search (https://arxiv.org/abs/1805.09501).

    Args:
        found_on: the data set of the search: imagenet, cifar10 or svhn.
        options: passed to ResizedCrop.
    """

    changes_colours = True

    def __init__(self, *, found_on: str = "imagenet", **options: Any) -> None:
        super().__init__(**options)
        names = [policy.value for policy in AutoAugmentPolicy]
        check_option("found_on", found_on, found_on in names, f"one of {', '.join(names)}")
        self.found_on = AutoAugmentPolicy(found_on)

    def policy(self, framing: Framing) -> list[Operation]:
        return [v2.AutoAugment(self.found_on, fill=framing.fill)]


class ThreeAugment(ResizedCrop):
    """The 3-Augment of DeiT III: grey, solarised or blurred, then jitter.

    Where `scale` is None it is the paper's simple random crop: the short side to image_size, four
    mirrored pixels. Source: https://arxiv.org/abs/2204.07118
    """

    changes_colours = True

    def __init__(
        self,
        *,
        scale: Sequence[float] | None = None,
        color_jitter: Sequence[float] | None = (0.3, 0.3, 0.3),
        **options: Any,
    ) -> None:
        super().__init__(scale=scale, color_jitter=color_jitter, **options)

    def crop(self, framing: Framing) -> list[Operation]:
        if self.scale is not None:
            return super().crop(framing)

        mode = InterpolationMode(framing.interpolation)
        return [
            v2.Lambda(framing.trim),
            v2.Resize(framing.image_size, mode),
            v2.RandomCrop(framing.image_size, PADDING, padding_mode="reflect"),
        ]

    def policy(self, framing: Framing) -> list[Operation]:
        # torchvision's own error names neither the option nor the augmentation.
        smallest = BLUR_KERNEL // 2 + 1
        if framing.image_size < smallest:
            raise UserError(
                f"augmentation=three_augment blurs over {BLUR_KERNEL} pixels: "
                f"data.image_size={framing.image_size} must be at least {smallest}."
            )

        grey = v2.Grayscale(framing.channels)
        # Deep images are from 0 to 1.
        solarised = v2.RandomSolarize(128 / 255 if framing.has_float_pixels else 128, p=1)
        blurred = v2.GaussianBlur(BLUR_KERNEL, SIGMA)
        return [v2.RandomChoice([grey, solarised, blurred])]
