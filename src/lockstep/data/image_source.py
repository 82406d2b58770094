"""Where loader workers find an image, in its file or in the node's array, and what they make of it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.data.augmentation import Operation, own_stream
from lockstep.data.image_array import Layout, own_pixels
from lockstep.data.image_tree import MAX_PIXELS, open_image
from lockstep.data.streaming import MakeImage

Source = Callable[[int], Image.Image]
"""Position → the whole image, RGB or L."""


def in_files(files: Sequence[Path], channels: int, max_pixels: int = MAX_PIXELS) -> Source:
    return lambda position: open_image(files[position], channels, max_pixels)


def in_array(path: Path, layout: Layout) -> Source:
    pixels = own_pixels(np.memmap(path, np.uint8, "r"), layout)
    return lambda position: Image.fromarray(pixels[position].squeeze(2) if layout.channels == 1 else pixels[position])


def as_stored(source: Source, square: Callable[[Image.Image], Image.Image], size: int) -> MakeImage:
    """Images as an array would hold them: of this size already, or made square."""

    def make(position: int, _draw: int) -> np.ndarray:
        image = source(position)
        return _pixels(image if image.size == (size, size) else square(image))

    return make


def augmented(source: Source, pipeline: Operation) -> MakeImage:
    """Images as training sees them; each one's draw seeds its own random stream."""

    def make(position: int, draw: int) -> np.ndarray:
        with own_stream(draw):
            return _pixels(pipeline(source(position)))

    return make


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels
