"""A random part of the image, resized: what ImageNet recipes begin with (https://arxiv.org/abs/1409.4842)."""

from collections.abc import Sequence
from typing import Any

from torchvision.transforms import InterpolationMode, v2

from lockstep.data.augmentation import Augmentation, Operation
from lockstep.data.framing import INTERPOLATIONS, Framing
from lockstep.runs.errors import UserError


class ResizedCrop(Augmentation):
    """
    Args:
        scale: least and greatest share of the image's area; None: the whole image by data.resize, of which a crop with
            data.crop_padding is taken.
        ratio: least and greatest width over height of the part.
        interpolation: bilinear or bicubic; None: as evaluation has it.
    """

    def __init__(
        self,
        *,
        scale: Sequence[float] | None = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        interpolation: str | None = None,
        **options: Any,
    ) -> None:
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
