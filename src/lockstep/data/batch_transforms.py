"""Resize, pad, crop, flip and normalise a whole batch on the device where it lies.

Equal to torchvision's Compose([Resize((resize, resize)), RandomCrop(image_size, padding=crop_padding),
RandomHorizontalFlip(), ToTensor(), Normalize(mean, std)]); in evaluation Resize, CenterCrop(image_size), Normalize.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.data.framing import Framing


class BatchTransforms(nn.Module):
    """Turn uint8 images into normalised float32 images.

    Args:
        framing: sizes, interpolation, border and flip of a training; its `fit` is of single images.
        std: per channel, for pixels from 0 to 1.
    """

    row_scale: Tensor
    row_shift: Tensor

    def __init__(self, framing: Framing, std: Sequence[float]) -> None:
        super().__init__()
        self.image_size, self.resize, self.interpolation = framing.image_size, framing.resize, framing.interpolation
        self.crop_padding, self.flip = framing.crop_padding, framing.flip
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        shift = -torch.tensor(framing.mean, dtype=torch.float64) * 255 * scale
        # Repeated for a whole row of pixels: a longer inner loop is several times as fast as one over the channels.
        self.register_buffer("row_scale", scale.float().repeat(self.image_size), persistent=False)
        self.register_buffer("row_shift", shift.float().repeat(self.image_size), persistent=False)

    @property
    def num_starts(self) -> int:
        """Return at how many positions along each side a crop can start."""
        return self.resize + 2 * self.crop_padding - self.image_size + 1

    def draw(self, generator: np.random.Generator, n: int) -> np.ndarray:
        """Return the random augmentation of n images: (3, n) int64, the rows dy and dx (crop start) and flip."""
        draws = np.zeros((3, n), np.int64)
        if self.num_starts > 1:
            draws[:2] = generator.integers(0, self.num_starts, (2, n))
        if self.flip:
            draws[2] = generator.integers(0, 2, n)
        return draws

    def centre(self) -> np.ndarray:
        """Return (3,) int64: torchvision's centre crop, not flipped."""
        start = self.crop_padding + round((self.resize - self.image_size) / 2)
        return np.array([start, start, 0], np.int64)

    @torch.no_grad()
    def forward(self, images: Tensor, draws: Tensor) -> Tensor:
        """Return (n, channels, image_size, image_size) float32, with the channels innermost in memory.

        Args:
            images: (n, side, side, channels) uint8 of any side.
            draws: (3, n) int64 as `draw` returns them.
        """
        return self.normalise(self.moved(images, draws, self.interpolation))

    def moved(self, images: Tensor, draws: Tensor, interpolation: str = "nearest") -> Tensor:
        """Return resized, cropped and flipped images, (n, image_size, image_size, channels) uint8.

        Args:
            interpolation: nearest for masks.
        """
        dy, dx, flip = draws
        if self.flip:  # before the resize, where images are small; the crop then starts at the other end
            images = _mirrored(images, flip)
            dx = dx + flip * (self.num_starts - 1 - 2 * dx)
        if images.shape[1] != self.resize:
            from torchvision.transforms import InterpolationMode
            from torchvision.transforms.v2 import functional

            mode, sides = InterpolationMode(interpolation), [self.resize, self.resize]
            images = functional.resize(images.permute(0, 3, 1, 2), sides, mode, antialias=True).permute(0, 2, 3, 1)
        return self.crop(images, dy, dx)

    def crop(self, images: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
        """Cut image_size × image_size out of each image and its black border."""
        if self.num_starts == 1:
            return images
        border, crop = self.crop_padding, self.image_size
        n, side, _, channels = images.shape
        row = (side + 2 * border) * channels
        # Every window of every image as a view, which costs nothing; the index then copies one window per image.
        shape = (n, self.num_starts, self.num_starts, crop, crop * channels)
        strides = (row * (side + 2 * border), row, channels, row, 1)
        if images.device.type == "cpu":  # NumPy copies in one thread: torch's would wait for each other at each step
            padded = np.zeros((n, side + 2 * border, side + 2 * border, channels), np.uint8)
            padded[:, border : border + side, border : border + side] = images.numpy()
            windows = np.lib.stride_tricks.as_strided(padded, shape, strides)
            return torch.from_numpy(windows[np.arange(n), dy.numpy(), dx.numpy()]).view(n, crop, crop, channels)
        images = F.pad(images, (0, 0, border, border, border, border)).contiguous()
        chosen = images.as_strided(shape, strides)[torch.arange(n, device=images.device), dy, dx]
        return chosen.view(n, crop, crop, channels)

    def normalise(self, images: Tensor) -> Tensor:
        """Return (n, channels, side, side) float32 of (n, side, side, channels) uint8."""
        n, side, _, channels = images.shape
        out = images.flatten(2).float()
        torch.addcmul(self.row_shift, out, self.row_scale, out=out)
        return out.view(n, side, side, channels).permute(0, 3, 1, 2)


def _mirrored(images: Tensor, flip: Tensor) -> Tensor:
    """Mirror images (n, height, width, channels) left to right where flip (n,) is 1."""
    if images.device.type != "cpu":
        return torch.where((flip > 0).view(-1, 1, 1, 1), images.flip(2), images)
    found, chosen = images.numpy().copy(), flip.numpy() > 0
    found[chosen] = found[chosen, :, ::-1]
    return torch.from_numpy(found)
