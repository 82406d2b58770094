"""Mean, deviation, crop and interpolation of images; the square that the model gets of an image or a whole batch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.runs.errors import UserError

AUTO = "auto"
VOID = 255  # in a mask: the pixel does not count
INTERPOLATIONS = ("bilinear", "bicubic")
MAX_ASPECT = 16  # of longer images only the middle is used: resizing 3000×2 to a short side of 224 would take 225 MB


def settle(
    stated: Mapping[str, Any], own: Mapping[str, Any], wanted: Mapping[str, Any], channels: int
) -> SimpleNamespace:
    """Return mean and std (per channel, for pixels from 0 to 1), crop_pct and interpolation to use.

    Also `from_weights`, the names of those that the weights gave.

    Args:
        stated: a value by name; None: the data's own; auto: the weights', else the data's own.
        own: mean and std of the data.
        wanted: what the pretrained weights want; {} without.
    Raises:
        UserError: a value is invalid, or has another number of channels.
    """
    used = {"crop_pct": 1.0, "interpolation": "bilinear", **own}
    used |= {key: value for key, value in stated.items() if value not in (None, AUTO)}
    taken = tuple(key for key in wanted if stated[key] == AUTO)
    for key in taken:
        value = wanted[key]
        if key in ("mean", "std") and len(value) != channels:  # of weights for colour images, on grey ones
            value = float(np.mean(value))
        used[key] = min(value, 1.0) if key == "crop_pct" else value  # timm states 1.15 for volo
    for key in ("mean", "std"):
        try:
            used[key] = np.broadcast_to(np.asarray(used[key], float), channels).tolist()
        except ValueError:
            kinds = f"auto, a number, or one for each of {channels} channels"
            raise UserError(f"data.{key}={used[key]} must be {kinds}.") from None
    if min(used["std"]) <= 0:
        raise UserError(f"data.std={used['std']} must be positive.")
    return SimpleNamespace(**used, from_weights=taken)


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
        if self.crop_padding < 0 or not 1 <= self.image_size <= self.resize:
            sizes = f"data.image_size={self.image_size} data.resize={self.resize} data.crop_padding={self.crop_padding}"
            raise UserError(f"{sizes}: image_size is from 1 to resize, crop_padding from 0.")

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


def resize_of(image_size: int, resize: int | None, crop_pct: float) -> int:
    """Return the side to resize to: as stated, else image_size / crop_pct with timm's rounding.

    Raises:
        UserError: crop_pct is not in (0, 1].
    """
    if isinstance(crop_pct, str) or not 0 < crop_pct <= 1:
        raise UserError(f"data.crop_pct={crop_pct} must be auto, or above 0 and at most 1.")
    return resize or math.floor(image_size / crop_pct)


class BatchTransforms:
    """Resize, pad, crop, flip and normalise a whole batch on the device where it lies, as torchvision does.

    Args:
        framing: sizes, interpolation, border and flip of a training; its `fit` is of single images.
        std: per channel, for pixels from 0 to 1.
    """

    def __init__(self, framing: Framing, std: Sequence[float], device: torch.device | str = "cpu") -> None:
        self.framing = framing
        self.num_starts = framing.resize + 2 * framing.crop_padding - framing.image_size + 1  # of a crop, on each side
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        shift = -torch.tensor(framing.mean, dtype=torch.float64) * 255 * scale
        # Repeated for a whole row of pixels: a longer inner loop is several times as fast as one over the channels.
        self._scale, self._shift = (each.float().repeat(framing.image_size).to(device) for each in (scale, shift))

    def draw(self, generator: np.random.Generator, n: int, random_crop: bool = True) -> np.ndarray:
        """Return the random augmentation of n images: (3, n) int64, the rows dy and dx (crop start) and flip."""
        draws, starts = self.centre()[:, None].repeat(n, 1), generator.integers(0, self.num_starts, (2, n))
        draws[:2] = starts if random_crop else draws[:2]
        if self.framing.flip:
            draws[2] = generator.integers(0, 2, n)
        return draws

    def centre(self) -> np.ndarray:
        """Return (3,) int64: torchvision's centre crop, not flipped."""
        start = self.framing.crop_padding + round((self.framing.resize - self.framing.image_size) / 2)
        return np.array([start, start, 0], np.int64)

    def moved(self, images: Tensor, draws: Tensor, interpolation: str) -> Tensor:
        """Return resized, cropped and flipped images, (n, [views,] image_size, image_size, channels) uint8.

        Args:
            images: (n, side, side, channels) uint8 of any side.
            draws: (3, n) int64 as `draw` returns them, or three rows for each view.
            interpolation: bilinear, bicubic, or nearest for masks.
        """
        if len(draws) > 3:
            return torch.stack([self.moved(images, each, interpolation) for each in draws.split(3)], 1)
        (dy, dx, flip), side = draws, self.framing.resize
        if self.framing.flip:  # before the resize, where images are small; the crop then starts at the other end
            images = _mirrored(images, flip)
            dx = dx + flip * (self.num_starts - 1 - 2 * dx)
        if images.shape[1] != side:
            mode = InterpolationMode(interpolation)
            images = F.resize(images.permute(0, 3, 1, 2), [side, side], mode, antialias=True).permute(0, 2, 3, 1)
        if self.num_starts == 1:
            return images
        border, crop = self.framing.crop_padding, self.framing.image_size
        fill = VOID if interpolation == "nearest" else 0
        if images.device.type == "cpu":  # in one thread, as `take`
            padded = np.full((len(images), side + 2 * border, side + 2 * border, images.shape[3]), fill, np.uint8)
            padded[:, border : side + border, border : side + border] = images.numpy()
            images = torch.from_numpy(padded)
        else:
            images = pad(images, (0, 0, border, border, border, border), value=fill).contiguous()
        n, _, width, channels = images.shape
        row = width * channels
        # Every window of every image as a view, which costs nothing; the index then copies one window per image.
        shape = (n, self.num_starts, self.num_starts, crop, crop * channels)
        windows = images.as_strided(shape, (row * width, row, channels, row, 1))
        return take(windows, torch.arange(n, device=images.device), dy, dx).view(n, crop, crop, channels)

    def normalise(self, images: Tensor) -> Tensor:
        """Return (…, channels, side, side) float32, channels last in memory, of (…, side, side, channels) uint8."""
        out = images.flatten(-2).float()
        return torch.addcmul(self._shift, out, self._scale, out=out).view(images.shape).movedim(-1, -3)


def take(array: Tensor, *index: Tensor) -> Tensor:
    """Return array[index]; on the CPU by NumPy in one thread, as torch's threads would wait for each other."""
    if array.device.type != "cpu":
        rows = array.view(len(array), -1) if array.is_contiguous() and len(index) == 1 else array
        if rows.ndim == 2 and rows.shape[1] % 8 == 0:  # whole images: 8 bytes at a time, not one
            return rows.view(torch.int64)[index[0]].view(array.dtype).view(-1, *array.shape[1:])
        return array[index]
    return torch.from_numpy(array.numpy()[tuple(each.numpy() for each in index)])


def _mirrored(images: Tensor, flip: Tensor) -> Tensor:
    """Mirror images (n, height, width, channels) left to right where flip (n,) is 1."""
    if images.device.type != "cpu":
        return torch.where((flip > 0).view(-1, 1, 1, 1), images.flip(2), images)
    found, chosen = images.numpy().copy(), flip.numpy() > 0
    pixels = found.view(f"V{found.shape[3]}")[..., 0]  # a pixel at a time: several times as fast as a byte at a time
    pixels[chosen] = pixels[chosen, :, ::-1]
    return torch.from_numpy(found)
