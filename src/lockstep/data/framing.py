"""Turn an image of any size into the square that the model gets: resize in proportion, then crop the centre."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image

from lockstep.runs.errors import UserError

if TYPE_CHECKING:
    from torchvision.transforms import InterpolationMode

FITS = ("crop", "squash")
INTERPOLATIONS = ("bilinear", "bicubic")
MAX_ASPECT = 16  # of longer images only the middle is used: resizing 3000×2 to a short side of 224 would take 225 MB


@dataclass(frozen=True)
class Framing:
    """How an image becomes a square. All sizes are in pixels.

    Args:
        image_size: side of the image that the model gets.
        resize: side before the crop of image_size: the short side with fit=crop, both sides with fit=squash.
        fit: crop keeps the proportions and cuts the long side, squash distorts the whole image to a square.
        interpolation: bilinear or bicubic, antialiased.
        crop_padding: width of the black border that random crops may reach into.
        flip: mirror half of the training images.
        channels: 3 for colour, 1 for grey.
        mean: per channel, for pixels from 0 to 1; augmentations fill gaps with it.
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
                f"data.resize={self.resize} is smaller than the crop data.image_size={self.image_size}: give "
                f"data.resize={self.image_size} or more, or leave it null."
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

    def trimmed(self, image: Image.Image) -> Image.Image:
        """Return the middle of an extremely long image."""
        longest = MAX_ASPECT * min(image.size)
        if self.fit == "squash" or max(image.size) <= longest:
            return image
        left, top = (max(0, (side - longest) // 2) for side in image.size)
        return image.crop((left, top, image.width - left, image.height - top))

    def resized(self, image: Image.Image) -> Image.Image:
        """Resize the short side to `resize`, or with fit=squash both sides."""
        from torchvision.transforms.v2 import functional as F

        image = self.trimmed(image)
        sides = [self.resize] if self.fit == "crop" else [self.resize, self.resize]
        return F.resize(image, sides, self.interpolation_mode)

    def square(self, image: Image.Image) -> Image.Image:
        """Return resize × resize pixels whose centre crop equals the centre crop of the whole resized image."""
        image = self.resized(image)
        left, top = (self._start(side) for side in image.size)
        return image.crop((left, top, left + self.resize, top + self.resize))

    def _start(self, side: int) -> int:
        """Where the square starts, so that both centre crops round as torchvision's."""
        return round((side - self.image_size) / 2) - round((self.resize - self.image_size) / 2)

    def centre(self, image: Image.Image) -> Image.Image:
        """Return the image_size × image_size pixels that evaluation shows the model."""
        from torchvision.transforms.v2 import functional as F

        return F.center_crop(self.resized(image), [self.image_size, self.image_size])


def resize_of(image_size: int, resize: int | None, crop_pct: float) -> int:
    """Return the side to resize to: as stated, else image_size / crop_pct with timm's rounding.

    Raises:
        UserError: crop_pct is not in (0, 1].
    """
    if not 0 < crop_pct <= 1:
        raise UserError(f"data.crop_pct={crop_pct} must be above 0 and at most 1.")
    return resize or math.floor(image_size / crop_pct)
