"""The base of src/augmentations/, and the crop and flip that the device can do to whole batches."""

from collections.abc import Callable, Sequence
from typing import Any

from torchvision.transforms import v2

from lockstep.data.framing import Framing
from lockstep.data.mixing import Mixing
from lockstep.runs.errors import UserError

Operation = Callable[[Any], Any]


def check(option: str, value: Any, is_valid: bool, requirement: str) -> None:
    if not is_valid:
        raise UserError(f"augmentation.{option}={value} must be {requirement}.")


class Augmentation:
    """Operations on single images, and mixing of pairs; a subclass returns `operations`.

    Args:
        flip: mirror half of the images left to right; None: as data.flip says.
        color_jitter: up to four numbers, the largest change of brightness, contrast, saturation and hue; None: none.
        erasing_prob: share of the images in which a rectangle becomes the mean colour.
        mixup_alpha …: as of Mixing.
    """

    def __init__(
        self, *, flip: bool | None = None, color_jitter: Sequence[float] | None = None, erasing_prob: float = 0.0,
        mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, mix_prob: float = 1.0, switch_prob: float = 0.5,
        mix_epochs: int | None = None,
    ) -> None:  # fmt: skip
        check("mix_prob", mix_prob, 0 <= mix_prob <= 1, "from 0 to 1")
        check("switch_prob", switch_prob, 0 <= switch_prob <= 1, "from 0 to 1")
        alphas = mixup_alpha, cutmix_alpha
        check("mixup_alpha", f"{mixup_alpha} and cutmix_alpha={cutmix_alpha}", min(alphas) >= 0, "from 0")
        self.flip, self.color_jitter, self.erasing_prob = flip, list(color_jitter or ()), erasing_prob
        self.mixing = Mixing(*alphas, mix_prob, switch_prob, mix_epochs) if max(alphas) > 0 else None

    def operations(self, framing: Framing) -> list[Operation]:
        """Return operations from a Pillow image of any size, RGB or L, to one of image_size × image_size.

        They draw from torch's generator alone, which is seeded for each image. A mask is moved by the same operations.
        """
        raise NotImplementedError

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

    @property
    def on_whole_batches(self) -> bool:
        """Return whether the device augments whole batches (BatchTransforms)."""
        return not self.color_jitter and not self.erasing_prob

    def operations(self, framing: Framing) -> list[Operation]:
        flip = [v2.RandomHorizontalFlip()] if self.flips(framing) else []
        if not self.random_crop:
            return [v2.Lambda(framing.centre), *flip]
        crop = v2.RandomCrop(framing.image_size, framing.crop_padding or None)
        return [v2.Lambda(framing.square), crop, *flip]
