"""Resize and crop single images to squares, and crop whole batches of squares."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.process.errors import UserError

# The value of a mask's pixel that does not count.
VOID = 255
INTERPOLATIONS = ("bilinear", "bicubic")
# Images with a larger aspect ratio are centre-cropped first. Without it, resizing 3000×2 to a short
# side of 224 would take 225 MB.
MAX_ASPECT = 16


@dataclass(frozen=True)
class Framing:
    """Make a square of an image or a mask, Pillow's or torchvision's. All sizes are in pixels.

    Args:
        image_size: the side of the image that the model gets.
        resize: the length of the short side before the crop. With fit=squash both sides have it.
        fit: crop keeps the proportions and cuts the long side; squash distorts the whole image to a
            square.
        interpolation: bilinear or bicubic, antialiased.
        crop_padding: the width of the black border that random crops may reach into.
        flip: mirror half of the training images.
        channels: 1: grey.
        has_float_pixels: single images are floats from 0 to 1, not bytes.
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
    has_float_pixels: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("fit", ("crop", "squash")), ("interpolation", INTERPOLATIONS)):
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(f"data.{name}={value} must be one of {', '.join(allowed)}.")
        if self.crop_padding < 0 or not 1 <= self.image_size <= self.resize:
            raise UserError(
                f"data.image_size={self.image_size} data.resize={self.resize} "
                f"data.crop_padding={self.crop_padding}: "
                "image_size is from 1 to resize, crop_padding from 0."
            )

    @property
    def crop_pct(self) -> float:
        """Return image_size / resize for exports. timm rounds it back to `resize`."""
        share = self.image_size / self.resize
        if resolve_resize(self.image_size, None, share) == self.resize:
            return share
        return math.nextafter(share, 0)

    @property
    def fill(self) -> list[int] | list[float]:
        """The mean colour, from 0 to 255, or from 0 to 1 where images are floats."""
        if self.has_float_pixels:
            return list(self.mean)
        return [round(255 * value) for value in self.mean]

    def trim(self, image: Any) -> Any:
        """Return the middle part of an extremely long image. Other images stay as they are."""
        sides = F.get_size(image)
        longest = MAX_ASPECT * min(sides)
        if max(sides) <= longest:
            return image
        return F.center_crop(image, [min(side, longest) for side in sides])

    def resize_image(self, image: Any) -> Any:
        """Resize the short side to `resize`, or with fit=squash both sides."""
        mode = InterpolationMode(self.interpolation)
        if self.fit == "squash":
            return F.resize(image, [self.resize, self.resize], mode)
        return F.resize(self.trim(image), [self.resize], mode)

    def square(self, image: Any) -> Any:
        """Return resize × resize pixels, from which BatchTransforms crop image_size × image_size.

        Their centre crop is the same as the centre crop of the whole resized image.
        """
        image = self.resize_image(image)
        height, width = F.get_size(image)

        # Both centre crops round like those of torchvision.
        border = round((self.resize - self.image_size) / 2)
        top = round((height - self.image_size) / 2) - border
        left = round((width - self.image_size) / 2) - border
        return F.crop(image, top, left, self.resize, self.resize)


def resolve_resize(image_size: int, resize: int | None, crop_pct: float) -> int:
    """Return the side to resize to: `resize`, else image_size / crop_pct with timm's rounding.

    Raises:
        UserError: crop_pct is not in (0, 1].
    """
    if isinstance(crop_pct, str) or not 0 < crop_pct <= 1:
        raise UserError(f"data.crop_pct={crop_pct} must be auto, or above 0 and at most 1.")
    if resize is not None:
        return resize
    return math.floor(image_size / crop_pct)


class BatchTransforms:
    """Resize, pad, crop, flip and normalise a whole batch on its device, as torchvision does.

    Args:
        framing: sizes, interpolation, border and flip. `fit` is not used, because the images are
            squares already.
        std: per channel, for pixels from 0 to 1.
        device: where the batches lie.
    """

    def __init__(
        self, framing: Framing, std: Sequence[float], device: torch.device | str = "cpu"
    ) -> None:
        self.framing = framing
        # The number of positions along each side at which a crop may start.
        padded_side = framing.resize + 2 * framing.crop_padding
        self.num_crop_starts = padded_side - framing.image_size + 1

        # Scale and shift are repeated for a whole row of pixels. The longer inner loop is several
        # times as fast as a loop over the channels.
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        shift = -torch.tensor(framing.mean, dtype=torch.float64) * 255 * scale
        self._scale = scale.float().repeat(framing.image_size).to(device)
        self._shift = shift.float().repeat(framing.image_size).to(device)

    def draw_crops(
        self, generator: np.random.Generator, n: int, random_crop: bool = True
    ) -> np.ndarray:
        """Return the random augmentation of n images.

        Returns:
            (3, n) int64, the rows dy and dx (crop start) and flip.
        """
        crops = self.centre_crop()[:, None].repeat(n, 1)
        # Drawn in any case, so that the flips are the same with and without random crops.
        crop_starts = generator.integers(0, self.num_crop_starts, (2, n))
        if random_crop:
            crops[:2] = crop_starts
        if self.framing.flip:
            crops[2] = generator.integers(0, 2, n)
        return crops

    def centre_crop(self) -> np.ndarray:
        """Return (3,) int64: torchvision's centre crop, not flipped."""
        border = round((self.framing.resize - self.framing.image_size) / 2)
        start = self.framing.crop_padding + border
        return np.array([start, start, 0], np.int64)

    def resize_crop_flip(self, images: Tensor, crops: Tensor, interpolation: str) -> Tensor:
        """Return resized, cropped and flipped images.

        Args:
            images: (n, side, side, channels) uint8 of any side, or float32 from 0 to 255.
            crops: (3, n) int64 as `draw_crops` returns them, or three rows for each view.
            interpolation: bilinear, bicubic, or nearest for masks.

        Returns:
            (n, [views,] image_size, image_size, channels) of the same type.
        """
        has_views = len(crops) > 3
        if has_views:
            views = [
                self.resize_crop_flip(images, view_crops, interpolation)
                for view_crops in crops.split(3)
            ]
            return torch.stack(views, 1)

        dy, dx, flip = crops
        if self.framing.flip:
            # Mirroring comes before the resize, while images are small. The crop of a mirrored
            # image starts as many pixels from the right as it would start from the left.
            images = _mirror(images, flip)
            dx = dx + flip * (self.num_crop_starts - 1 - 2 * dx)
        images = self._resize(images, interpolation)
        if self.num_crop_starts == 1:
            return images

        # Assigning to the same name frees the images without the border. The crop is then written
        # into their memory, which is still in the cache of the CPU.
        images = self._pad(images, fill=VOID if interpolation == "nearest" else 0)
        return self._crop(images, dy, dx)

    def _resize(self, images: Tensor, interpolation: str) -> Tensor:
        side = self.framing.resize
        if images.shape[1] == side:
            return images
        mode = InterpolationMode(interpolation)
        resized = F.resize(images.permute(0, 3, 1, 2), [side, side], mode, antialias=True)
        return resized.permute(0, 2, 3, 1)

    def _pad(self, images: Tensor, fill: int) -> Tensor:
        """Return images with the border that crops may reach into, contiguous in memory."""
        border = self.framing.crop_padding
        if images.device.type != "cpu":
            return pad(images, (0, 0, border, border, border, border), value=fill).contiguous()

        # On a CPU NumPy pads in one thread, for the reason that `index_rows` gives.
        n, side, _, channels = images.shape
        padded_side = side + 2 * border
        pixels = images.numpy()
        padded = np.full((n, padded_side, padded_side, channels), fill, pixels.dtype)
        middle = slice(border, side + border)
        padded[:, middle, middle] = pixels
        return torch.from_numpy(padded)

    def _crop(self, images: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
        """Return the window of each image that begins at (dy, dx)."""
        n, _, width, channels = images.shape
        crop = self.framing.image_size
        row = width * channels

        # A view of every window of every image costs nothing. The index then copies one window of
        # each image.
        shape = (n, self.num_crop_starts, self.num_crop_starts, crop, crop * channels)
        windows = images.as_strided(shape, (row * width, row, channels, row, 1))
        numbers = torch.arange(n, device=images.device)
        return index_rows(windows, numbers, dy, dx).view(n, crop, crop, channels)

    def normalise(self, images: Tensor) -> Tensor:
        """Return (…, channels, side, side) float32, channels last in memory.

        Args:
            images: (…, side, side, channels) uint8, or float32 from 0 to 255.
        """
        out = images.flatten(-2).float()
        if images.is_floating_point():
            # `float` copies bytes but not floats. The next line would overwrite them.
            out = out.clone()
        torch.addcmul(self._shift, out, self._scale, out=out)
        return out.view(images.shape).movedim(-1, -3)


def index_rows(array: Tensor, *index: Tensor) -> Tensor:
    """Return array[index].

    On the CPU NumPy does it in one thread, because torch's threads would wait for each other.
    """
    if array.device.type == "cpu":
        return torch.from_numpy(array.numpy()[tuple(part.numpy() for part in index)])

    # Whole images are copied 8 bytes at a time, not one.
    if array.is_contiguous() and len(index) == 1:
        rows = array.view(len(array), -1)
        if rows.shape[1] % 8 == 0:
            chosen_rows = rows.view(torch.int64)[index[0]].view(array.dtype)
            return chosen_rows.view(-1, *array.shape[1:])
    return array[index]


def _mirror(images: Tensor, flip: Tensor) -> Tensor:
    """Mirror images (n, height, width, channels) left to right where flip (n,) is 1."""
    if images.device.type != "cpu":
        is_flipped = (flip > 0).view(-1, 1, 1, 1)
        return torch.where(is_flipped, images.flip(2), images)

    # A pixel at a time is several times as fast as a byte at a time.
    mirrored = images.numpy().copy()
    pixels = mirrored.view(f"V{mirrored.shape[3] * mirrored.itemsize}")[..., 0]
    flips = flip.numpy() > 0
    pixels[flips] = pixels[flips, :, ::-1]
    return torch.from_numpy(mirrored)
