"""The base of src/augmentations/, and the random stream that belongs to one image.

torchvision is imported where single images are augmented: other runs start a third of a second sooner.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data.framing import Framing
from lockstep.data.mixing import Mixing
from lockstep.runs.errors import UserError

if TYPE_CHECKING:
    from torchvision.transforms import v2

Operation = Callable[[Any], Any]


class Augmentation:
    """Operations on single images, and mixing of pairs; a subclass returns `operations`.

    Args:
        flip: mirror half of the images left to right; None: as data.flip says.
        color_jitter: up to four numbers, the largest change of brightness, contrast, saturation and hue; None: none.
        erasing_prob: share of the images in which a rectangle becomes the mean colour.
        mixup_alpha, cutmix_alpha: of the Beta distributions; 0: no mixup, no cutmix.
        mix_prob: share of the pairs that are mixed.
        switch_prob: with both, the share of cutmix.
        mix_epochs: mix in the first so many epochs; None: in all.
    """

    def __init__(
        self, *, flip: bool | None = None, color_jitter: Sequence[float] | None = None, erasing_prob: float = 0.0,
        mixup_alpha: float = 0.0, cutmix_alpha: float = 0.0, mix_prob: float = 1.0, switch_prob: float = 0.5,
        mix_epochs: int | None = None,
    ) -> None:  # fmt: skip
        for key, value in (("mix_prob", mix_prob), ("switch_prob", switch_prob)):
            if not 0 <= value <= 1:
                raise UserError(f"augmentation.{key}={value} must be from 0 to 1.")
        if min(mixup_alpha, cutmix_alpha) < 0:
            raise UserError(f"augmentation.mixup_alpha={mixup_alpha} and cutmix_alpha={cutmix_alpha} must be from 0.")
        self.flip, self.color_jitter, self.erasing_prob = flip, list(color_jitter or ()), erasing_prob
        alphas = mixup_alpha, cutmix_alpha
        self.mixing = Mixing(*alphas, mix_prob, switch_prob, mix_epochs) if max(alphas) > 0 else None

    def operations(self, framing: Framing) -> list[Operation]:
        """Return operations from a Pillow image of any size, RGB or L, to one of image_size × image_size.

        They draw from torch's generator alone, which is seeded for each image.
        """
        raise NotImplementedError

    def flips(self, framing: Framing) -> bool:
        return framing.flip if self.flip is None else self.flip

    def pipeline(self, framing: Framing) -> "v2.Compose":
        """Return all operations on one image, in order.

        Raises:
            UserError: an option is out of its range, or the images have neither one channel nor three.
        """
        from torchvision.transforms import v2

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
        from torchvision.transforms import v2

        flip = [v2.RandomHorizontalFlip()] if self.flips(framing) else []
        if not self.random_crop:
            return [framing.centre, *flip]
        return [framing.square, v2.RandomCrop(framing.image_size, framing.crop_padding or None), *flip]


@contextmanager
def own_stream(seed: int) -> Iterator[None]:
    """Seed torch's generator on the CPU for the block, and restore it afterwards.

    torch.manual_seed would seed the GPU's generator as well.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
