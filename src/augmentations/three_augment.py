"""The 3-Augment of DeiT III: one of grey, solarised, blurred; then colour jitter (https://arxiv.org/abs/2204.07118)."""

from collections.abc import Sequence
from typing import Any

from torchvision.transforms import v2

from augmentations.resized_crop import ResizedCrop
from lockstep.data.augmentation import Operation
from lockstep.data.framing import Framing
from lockstep.runs.errors import UserError

PADDING, BLUR, SIGMA = 4, 13, (0.1, 2.0)  # the kernel reaches over three of the largest sigmas


class ThreeAugment(ResizedCrop):
    """The paper's simple random crop where `scale` is None: the short side to image_size, four mirrored pixels."""

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
