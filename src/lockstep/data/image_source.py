"""Where loader workers find an image, in its file or in the node's array, and what they make of it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.data.augmentation import Operation, own_stream
from lockstep.data.image_array import Layout, own_pixels
from lockstep.data.image_tree import MAX_PIXELS, open_image
from lockstep.data.streaming import MakeImage

Source = Callable[[int], Image.Image]
"""Position → the whole image, RGB or L."""


@dataclass(frozen=True)
class InFiles:
    """Images that are decoded when they are asked for."""

    files: Sequence[Path]
    channels: int
    max_pixels: int = MAX_PIXELS

    def __call__(self, position: int) -> Image.Image:
        return open_image(self.files[position], self.channels, self.max_pixels)


@dataclass(frozen=True)
class InArray:
    """Images of the node's array, which each worker opens for itself."""

    path: Path
    layout: Layout

    def __call__(self, position: int) -> Image.Image:
        pixels = own_pixels(np.memmap(self.path, np.uint8, "r"), self.layout)[position]
        return Image.fromarray(pixels.squeeze(2) if self.layout.channels == 1 else pixels)


def as_stored(source: Source, square: Callable[[Image.Image], Image.Image], size: int) -> MakeImage:
    """Images as an array would hold them: of this size already, or made square."""
    return functools.partial(_stored, source, square, size)


def _stored(
    source: Source, square: Callable[[Image.Image], Image.Image], size: int, position: int, _draw: int
) -> np.ndarray:
    image = source(position)
    return _pixels(image if image.size == (size, size) else square(image))


def augmented(source: Source, pipeline: Operation) -> MakeImage:
    """Images as training sees them; each one's draw seeds its own random stream."""
    return functools.partial(_augmented, source, pipeline)


def _augmented(source: Source, pipeline: Operation, position: int, draw: int) -> np.ndarray:
    with own_stream(draw):
        return _pixels(pipeline(source(position)))


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels
