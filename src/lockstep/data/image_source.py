"""Where loader workers find an image, in its file or in the node's array, and what they make of it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image

from lockstep.data.augmentation import Operation, own_stream
from lockstep.data.framing import Framing
from lockstep.data.image_array import Layout, own_pixels
from lockstep.data.image_list import forget
from lockstep.data.image_tree import CorruptImage, fitted, open_image
from lockstep.data.places import Places, Remote
from lockstep.data.streaming import MakeImage


class Source(Protocol):
    def __call__(self, position: int) -> Image.Image:
        """The whole image, RGB or L."""

    def name(self, position: int) -> str:
        """For errors."""

    def ahead(self, positions: Sequence[int]) -> None:
        """These will be asked for next."""


@dataclass(frozen=True)
class InPlaces:
    """Encoded images that are read and decoded when they are asked for.

    Args:
        kept: where Places.save wrote.
        folder: what their files are relative to.
        listing: of the list that they come from, which is forgotten when it proves to be out of date.
        remote: for files that are a copy of a bucket.
    """

    kept: Path
    folder: Path
    listing: Path
    channels: int
    max_pixels: int
    remote: Remote | None = None

    def __call__(self, position: int) -> Image.Image:
        places = _opened(self.kept, self.folder)
        try:
            data = places.open(position, self.max_pixels, self.remote)
        except CorruptImage:
            forget(self.listing)
            raise
        return open_image(data, self.channels, self.max_pixels, name=places.name(position))

    def name(self, position: int) -> str:
        return _opened(self.kept, self.folder).name(position)

    def ahead(self, positions: Sequence[int]) -> None:
        if self.remote is not None:
            _opened(self.kept, self.folder).ahead(positions, self.remote)


_opened = functools.lru_cache(maxsize=4)(Places.kept)  # once per process


@dataclass(frozen=True)
class InArray:
    """Images of the node's array, which each worker opens for itself."""

    path: Path
    layout: Layout

    def __call__(self, position: int) -> Image.Image:
        pixels = own_pixels(np.memmap(self.path, np.uint8, "r"), self.layout)[position]
        return Image.fromarray(pixels.squeeze(2) if self.layout.channels == 1 else pixels)

    def name(self, position: int) -> str:
        return f"image {position} of {self.path}"

    def ahead(self, positions: Sequence[int]) -> None:
        """They are here."""


def as_stored(source: Source, framing: Framing, size: int) -> MakeImage:
    """Images as an array would hold them: of this size already, or made square."""
    return functools.partial(_stored, source, framing, size)


def _stored(source: Source, framing: Framing, size: int, position: int, _draw: int) -> np.ndarray:
    return fitted(source(position), framing, size, lambda: source.name(position))


def augmented(source: Source, pipeline: Operation) -> MakeImage:
    """Images as training sees them; each one's draw seeds its own random stream."""
    return functools.partial(_augmented, source, pipeline)


def _augmented(source: Source, pipeline: Operation, position: int, draw: int) -> np.ndarray:
    with own_stream(draw):
        return _pixels(pipeline(source(position)))


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels
