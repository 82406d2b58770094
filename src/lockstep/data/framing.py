"""From a picture of any size to the square that the model gets: resized, cut out of the middle, in proportion."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from lockstep.runs.errors import UserError

if TYPE_CHECKING:
    from torchvision.transforms import InterpolationMode

FITS = ("crop", "squash")
INTERPOLATIONS = ("bilinear", "bicubic")


@dataclass(frozen=True)
class Framing:
    """How an image becomes a square; all sides in pixels.

    Args:
        image_size: side of what the model gets.
        resize: side that the image is resized to before a crop of image_size: its short side, or both under squash.
        fit: crop keeps the image's proportions and cuts its long side off, squash keeps all of it and distorts it.
        interpolation: bilinear or bicubic, antialiased.
        crop_padding: black border that random crops may reach into.
        flip: mirror half of the training images.
        channels: 3 for colour, 1 for grey.
        mean: per channel, of pixels from 0 to 1: what an augmentation fills gaps with.
    Raises:
        UserError: the sizes contradict each other.
    """

    image_size: int
    resize: int
    fit: str = "crop"
    interpolation: str = "bilinear"
    crop_padding: int = 0
    flip: bool = False
    channels: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        for key, allowed in (("fit", FITS), ("interpolation", INTERPOLATIONS)):
            if getattr(self, key) not in allowed:
                raise UserError(f"data.{key}={getattr(self, key)} must be one of {', '.join(allowed)}.")
        if self.image_size < 1 or self.crop_padding < 0:
            raise UserError(
                f"data.image_size={self.image_size} must be at least 1 and data.crop_padding={self.crop_padding} at "
                "least 0."
            )
        if self.resize < self.image_size:
            raise UserError(
                f"data.resize={self.resize} is smaller than data.image_size={self.image_size}, which is cut out of it: "
                f"give data.resize={self.image_size} or more, or leave it null."
            )

    @property
    def crop_pct(self) -> float:
        """image_size / resize, so that timm's rounding gives `resize` again."""
        share = self.image_size / self.resize
        return share if resize_of(self.image_size, None, share) == self.resize else math.nextafter(share, 0)

    @property
    def fill(self) -> list[int]:
        """The mean colour, from 0 to 255."""
        return [round(255 * value) for value in self.mean]

    @property
    def interpolation_mode(self) -> "InterpolationMode":
        from torchvision.transforms import InterpolationMode

        return InterpolationMode(self.interpolation)

    def resized(self, image: Image.Image) -> Image.Image:
        """Under crop with a short side of `resize`, under squash resize × resize."""
        from torchvision.transforms.v2 import functional as F

        sides = [self.resize] if self.fit == "crop" else [self.resize, self.resize]
        return F.resize(image, sides, self.interpolation_mode)

    def square(self, image: Image.Image) -> Image.Image:
        """resize × resize, whose centre crop of image_size is that of the whole resized image."""
        image = self.resized(image)
        left, top = (self._start(side) for side in image.size)
        return image.crop((left, top, left + self.resize, top + self.resize))

    def _start(self, side: int) -> int:
        """Both centre crops round as torchvision does, and so do the two after each other."""
        return round((side - self.image_size) / 2) - round((self.resize - self.image_size) / 2)

    def centre(self, image: Image.Image) -> Image.Image:
        """image_size × image_size: what evaluation shows the model."""
        from torchvision.transforms.v2 import functional as F

        return F.center_crop(self.resized(image), [self.image_size, self.image_size])


def resize_of(image_size: int, resize: int | None, crop_pct: float) -> int:
    """The side to resize to: as stated, else so that the crop is this share of it (timm's rounding).

    Raises:
        UserError: crop_pct is not above 0 and at most 1.
    """
    if not 0 < crop_pct <= 1:
        raise UserError(f"data.crop_pct={crop_pct} must be above 0 and at most 1.")
    return resize or math.floor(image_size / crop_pct)
