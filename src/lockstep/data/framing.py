"""Mean, deviation, crop and interpolation of images, and the square that the model gets of any image."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.runs.errors import UserError

if TYPE_CHECKING:
    from torchvision.transforms import InterpolationMode

AUTO = "auto"
INTERPOLATIONS = ("bilinear", "bicubic")
MAX_ASPECT = 16  # of longer images only the middle is used: resizing 3000×2 to a short side of 224 would take 225 MB


@dataclass(frozen=True)
class ImageSettings:
    """
    Args:
        mean, std: per channel, for pixels from 0 to 1.
        crop_pct: share of the resized side that evaluation shows.
        interpolation: bilinear or bicubic.
        from_weights: the names of the values that the pretrained weights gave.
        against_weights: the names of the values that are stated otherwise than the weights want.
    """

    mean: list[float]
    std: list[float]
    crop_pct: float
    interpolation: str
    from_weights: tuple[str, ...] = ()
    against_weights: tuple[str, ...] = ()


def settle(
    stated: Mapping[str, Any], own: Mapping[str, Any], wanted: Mapping[str, Any], channels: int
) -> ImageSettings:
    """Return the values to use.

    Args:
        stated: a value by name; None: the data's own; auto: the weights', else the data's own.
        own: mean and std of the data.
        wanted: what the pretrained weights want; {} without.
    Raises:
        UserError: a value is invalid, or has another number of channels.
    """
    theirs, default = dict(wanted), {"crop_pct": 1.0, "interpolation": "bilinear", **own}
    for key in ("mean", "std"):  # of weights that were trained on another number of channels, their mean for each
        if key in theirs and len(theirs[key]) != channels:
            theirs[key] = [float(np.mean(theirs[key]))] * channels
    used: dict[str, Any] = {}
    for key, value in stated.items():
        used[key] = theirs.get(key, default[key]) if value == AUTO else default[key] if value is None else value
    for key in ("mean", "std"):
        try:
            used[key] = np.broadcast_to(np.asarray(used[key], float), channels).tolist()
        except ValueError:
            kinds = f"auto, a number, or one for each of {channels} channels"
            raise UserError(f"data.{key}={used[key]} must be {kinds}.") from None
    if min(used["std"]) <= 0:
        raise UserError(f"data.std={used['std']} must be positive.")
    against = [
        key for key, value in theirs.items()
        if (used[key] != value if isinstance(value, str) else not np.allclose(used[key], value, atol=0.01))
    ]  # fmt: skip
    taken = tuple(key for key in theirs if stated[key] == AUTO)
    return ImageSettings(**used, from_weights=taken, against_weights=tuple(against))


def moves_together(method: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Let a method of one image take a tuple of an image and its masks as well."""

    @wraps(method)
    def moved(self: Any, image: Any) -> Any:
        return tuple(method(self, each) for each in image) if isinstance(image, tuple) else method(self, image)

    return moved


@dataclass(frozen=True)
class Framing:
    """Make a square of an image. All sizes are in pixels.

    The methods take a Pillow image or a mask of torchvision, or a tuple of them, which moves together.

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
        for key, allowed in (("fit", ("crop", "squash")), ("interpolation", INTERPOLATIONS)):
            if getattr(self, key) not in allowed:
                raise UserError(f"data.{key}={getattr(self, key)} must be one of {', '.join(allowed)}.")
        for key, least in (("image_size", 1), ("crop_padding", 0), ("resize", self.image_size)):
            if getattr(self, key) < least:
                size = f"data.image_size={self.image_size}, " if key == "resize" else ""
                raise UserError(f"data.{key}={getattr(self, key)} must be at least {size}{least}.")

    @property
    def crop_pct(self) -> float:
        """Return image_size / resize, so that timm's rounding gives `resize` again."""
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

    @moves_together
    def trimmed(self, image: Any) -> Any:
        """Return the middle of an extremely long image."""
        from torchvision.transforms.v2 import functional as F

        height, width = F.get_size(image)
        longest = MAX_ASPECT * min(height, width)
        if self.fit == "squash" or max(height, width) <= longest:
            return image
        return F.center_crop(image, [min(height, longest), min(width, longest)])

    def _resized(self, image: Any) -> Any:
        """Resize the short side to `resize`, or with fit=squash both sides."""
        from torchvision.transforms.v2 import functional as F

        sides = [self.resize] if self.fit == "crop" else [self.resize, self.resize]
        return F.resize(self.trimmed(image), sides, self.interpolation_mode)

    @moves_together
    def square(self, image: Any) -> Any:
        """Return resize × resize pixels whose centre crop equals the centre crop of the whole resized image."""
        from torchvision.transforms.v2 import functional as F

        image = self._resized(image)
        inner = round((self.resize - self.image_size) / 2)  # both centre crops round as torchvision's
        top, left = (round((side - self.image_size) / 2) - inner for side in F.get_size(image))
        return F.crop(image, top, left, self.resize, self.resize)

    @moves_together
    def centre(self, image: Any) -> Any:
        """Return the image_size × image_size pixels that evaluation shows the model."""
        from torchvision.transforms.v2 import functional as F

        return F.center_crop(self._resized(image), [self.image_size, self.image_size])


def resize_of(image_size: int, resize: int | None, crop_pct: float) -> int:
    """Return the side to resize to: as stated, else image_size / crop_pct with timm's rounding.

    Raises:
        UserError: crop_pct is not in (0, 1].
    """
    if isinstance(crop_pct, str) or not 0 < crop_pct <= 1:
        raise UserError(f"data.crop_pct={crop_pct} must be auto, or above 0 and at most 1.")
    return resize or math.floor(image_size / crop_pct)
