"""Mean, deviation, crop and interpolation of images, and the square that the model gets of any image."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.runs.errors import UserError

AUTO = "auto"
INTERPOLATIONS = ("bilinear", "bicubic")
MAX_ASPECT = 16  # of longer images only the middle is used: resizing 3000×2 to a short side of 224 would take 225 MB


def settle(
    stated: Mapping[str, Any], own: Mapping[str, Any], wanted: Mapping[str, Any], channels: int
) -> SimpleNamespace:
    """Return mean and std (per channel, for pixels from 0 to 1), crop_pct and interpolation to use.

    Also `from_weights` and `against_weights`, the names of those that the weights gave, and want otherwise.

    Args:
        stated: a value by name; None: the data's own; auto: the weights', else the data's own.
        own: mean and std of the data.
        wanted: what the pretrained weights want; {} without.
    Raises:
        UserError: a value is invalid, or has another number of channels.
    """
    theirs, used = dict(wanted), {"crop_pct": 1.0, "interpolation": "bilinear", **own}
    for key in ("mean", "std"):  # of weights that were trained on another number of channels, their mean for each
        if key in theirs and len(theirs[key]) != channels:
            theirs[key] = [float(np.mean(theirs[key]))] * channels
    taken = tuple(key for key in theirs if stated[key] == AUTO)
    used |= {key: value for key, value in stated.items() if value not in (None, AUTO)}
    used |= {key: theirs[key] for key in taken}
    for key in ("mean", "std"):
        try:
            used[key] = np.broadcast_to(np.asarray(used[key], float), channels).tolist()
        except ValueError:
            kinds = f"auto, a number, or one for each of {channels} channels"
            raise UserError(f"data.{key}={used[key]} must be {kinds}.") from None
    if min(used["std"]) <= 0:
        raise UserError(f"data.std={used['std']} must be positive.")
    against = tuple(
        key for key, value in theirs.items()
        if used[key] != value and (isinstance(value, str) or not np.allclose(used[key], value, atol=0.01))
    )  # fmt: skip
    return SimpleNamespace(**used, from_weights=taken, against_weights=against)


@dataclass(frozen=True)
class Framing:
    """Make a square of an image or a mask, Pillow's or torchvision's. All sizes are in pixels.

    Raises:
        UserError: the sizes contradict each other.
    """

    image_size: int  # side of the image that the model gets
    resize: int  # side before the crop of image_size: the short side with fit=crop, both sides with fit=squash
    fit: str = "crop"  # keeps the proportions and cuts the long side; squash distorts the whole image to a square
    interpolation: str = "bilinear"  # or bicubic, antialiased
    crop_padding: int = 0  # width of the black border that random crops may reach into
    flip: bool = False  # mirror half of the training images
    channels: int = 3  # 1: grey
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # per channel, for pixels from 0 to 1; augmentations fill gaps with it

    def __post_init__(self) -> None:
        for key, allowed in (("fit", ("crop", "squash")), ("interpolation", INTERPOLATIONS)):
            if (value := getattr(self, key)) not in allowed:
                raise UserError(f"data.{key}={value} must be one of {', '.join(allowed)}.")
        for key, least, name in (
            ("image_size", 1, ""),
            ("crop_padding", 0, ""),
            ("resize", self.image_size, "data.image_size="),
        ):
            if (value := getattr(self, key)) < least:
                raise UserError(f"data.{key}={value} must be at least {name}{least}.")

    @property
    def crop_pct(self) -> float:
        """Return image_size / resize, so that timm's rounding gives `resize` again."""
        share = self.image_size / self.resize
        return share if resize_of(self.image_size, None, share) == self.resize else math.nextafter(share, 0)

    @property
    def fill(self) -> list[int]:
        """The mean colour, from 0 to 255."""
        return [round(255 * value) for value in self.mean]

    def trimmed(self, image: Any) -> Any:
        """Return the middle of an extremely long image."""
        sides = F.get_size(image)
        longest = MAX_ASPECT * min(sides)
        return image if max(sides) <= longest else F.center_crop(image, [min(side, longest) for side in sides])

    def resized(self, image: Any) -> Any:
        """Resize the short side to `resize`, or with fit=squash both sides."""
        mode = InterpolationMode(self.interpolation)
        if self.fit == "squash":
            return F.resize(image, [self.resize, self.resize], mode)
        return F.resize(self.trimmed(image), [self.resize], mode)

    def square(self, image: Any) -> Any:
        """Return resize × resize pixels whose centre crop equals the centre crop of the whole resized image."""
        image = self.resized(image)
        inner = round((self.resize - self.image_size) / 2)  # both centre crops round as torchvision's
        top, left = (round((side - self.image_size) / 2) - inner for side in F.get_size(image))
        return F.crop(image, top, left, self.resize, self.resize)

    def centre(self, image: Any) -> Any:
        """Return the image_size × image_size pixels that evaluation shows the model."""
        return F.center_crop(self.resized(image), [self.image_size, self.image_size])


def resize_of(image_size: int, resize: int | None, crop_pct: float) -> int:
    """Return the side to resize to: as stated, else image_size / crop_pct with timm's rounding.

    Raises:
        UserError: crop_pct is not in (0, 1].
    """
    if isinstance(crop_pct, str) or not 0 < crop_pct <= 1:
        raise UserError(f"data.crop_pct={crop_pct} must be auto, or above 0 and at most 1.")
    return resize or math.floor(image_size / crop_pct)
