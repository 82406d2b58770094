"""Resize, pad, crop, flip and normalise a whole batch on the device where it lies.

Equal to torchvision's Compose([Resize((resize, resize)), RandomCrop(image_size, padding=crop_padding),
RandomHorizontalFlip(), ToTensor(), Normalize(mean, std)]); in evaluation Resize, CenterCrop(image_size), Normalize.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from lockstep.data.framing import Framing


class BatchTransforms:
    """Turn uint8 images into normalised float32 images.

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

    def draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        """Return the random augmentation of n images: (3, n) int64, the rows dy and dx (crop start) and flip."""
        draws = np.zeros((3, n), np.int64)
        if self.num_starts > 1:
            draws[:2] = generator.integers(0, self.num_starts, (2, n))
        if self.framing.flip:
            draws[2] = generator.integers(0, 2, n)
        return draws

    def centre(self) -> np.ndarray:
        """Return (3,) int64: torchvision's centre crop, not flipped."""
        start = self.framing.crop_padding + round((self.framing.resize - self.framing.image_size) / 2)
        return np.array([start, start, 0], np.int64)

    def views(self, images: Tensor, interpolation: str, draws: Tensor) -> Tensor:
        """Return `moved` for each view (three rows of draws), stacked along the second axis if there are several."""
        found = [self.moved(images, each, interpolation) for each in draws.split(3)]
        return found[0] if len(found) == 1 else torch.stack(found, 1)

    def moved(self, images: Tensor, draws: Tensor, interpolation: str) -> Tensor:
        """Return resized, cropped and flipped images, (n, image_size, image_size, channels) uint8.

        Args:
            images: (n, side, side, channels) uint8 of any side.
            draws: (3, n) int64 as `draw` returns them.
            interpolation: bilinear, bicubic, or nearest for masks.
        """
        (dy, dx, flip), sides = draws, [self.framing.resize, self.framing.resize]
        if self.framing.flip:  # before the resize, where images are small; the crop then starts at the other end
            images = _mirrored(images, flip)
            dx = dx + flip * (self.num_starts - 1 - 2 * dx)
        if images.shape[1] != self.framing.resize:
            mode = InterpolationMode(interpolation)
            images = functional.resize(images.permute(0, 3, 1, 2), sides, mode, antialias=True).permute(0, 2, 3, 1)
        if self.num_starts == 1:
            return images
        border, crop = self.framing.crop_padding, self.framing.image_size
        images = F.pad(images, (0, 0, border, border, border, border)).contiguous()
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
        return array[index]
    return torch.from_numpy(array.numpy()[tuple(each.numpy() for each in index)])


def _mirrored(images: Tensor, flip: Tensor) -> Tensor:
    """Mirror images (n, height, width, channels) left to right where flip (n,) is 1."""
    if images.device.type != "cpu":
        return torch.where((flip > 0).view(-1, 1, 1, 1), images.flip(2), images)
    found, chosen = images.numpy().copy(), flip.numpy() > 0
    found[chosen] = found[chosen, :, ::-1]
    return torch.from_numpy(found)
