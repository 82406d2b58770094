"""The depth of the images of a data set: their bits, their black and white, and their mean.

The headers of some images say whether any image is deep. Only then each node reads the values of
the images once.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import THREADS, CorruptImage, decode_all, to_array
from lockstep.data.file_values import Header, read_header
from lockstep.data.framing import Framing
from lockstep.data.image_list import ImageList
from lockstep.data.node_cache import Metadata

# The images whose headers are read.
HEADER_SAMPLE = 64
# The evenly spaced images of which the mean is measured, and the pixels of each for percentiles.
MEASURED_IMAGES = 1024
PIXELS_OF_IMAGE = 4096
PERCENTILES = (0.5, 99.5)
# If values fill a smaller share of their range than this, the range is probably wrong.
LEAST_SHARE = 0.1
EXTREMES = "extremes.npy"


def pick_evenly(positions: np.ndarray, count: int) -> list[int]:
    """Return at most `count` of the positions, evenly spaced."""
    indices = np.linspace(0, len(positions) - 1, min(len(positions), count))
    return positions[indices.astype(int)].tolist()


@dataclass
class Survey:
    """The headers of some images by position, without those of images that cannot be read."""

    images: ImageList
    headers: dict[int, Header]

    @classmethod
    def read_headers(cls, images: ImageList, positions: Iterable[int]) -> "Survey":
        headers = {}
        for position in positions:
            # A damaged image is named when its pixels are needed.
            with suppress(Exception):
                headers[position] = read_header(images.file(position))
        return cls(images, headers)

    @property
    def has_over_8_bits(self) -> bool:
        return any(header.has_over_8_bits for header in self.headers.values())

    @property
    def has_windows(self) -> bool:
        """Return whether each deep image says which of its values are black and white."""
        deep_images = [header for header in self.headers.values() if header.has_over_8_bits]
        return bool(deep_images) and all(header.has_window for header in deep_images)

    @property
    def depth(self) -> str:
        """Return "16 bits", or "8 bits, 16 bits" if the images differ."""
        return ", ".join(sorted({header.depth for header in self.headers.values()}))

    def warnings(self) -> list[str]:
        """Return sentences for the user about the images' bits and pages."""
        sentences = []
        examples: dict[str, str] = {}
        for position, header in self.headers.items():
            examples.setdefault(header.depth, self.images.name(position))
        if len(examples) > 1:
            listed = ", ".join(f"{depth} as {name}" for depth, name in sorted(examples.items()))
            sentences.append(
                f"The images differ in depth: {listed}. Images of 8 bits are from 0 to 255, "
                "whatever data.range says."
            )
        for position, header in self.headers.items():
            if header.loses_bits:
                sentences.append(
                    f"{self.images.name(position)} has {header.depth} for each colour, of which "
                    "Pillow reads 8. Save such images as NPY, or as TIFF and pip install tifffile."
                )
                break
        return sentences + self._describe_pages()

    def _describe_pages(self) -> list[str]:
        page = self.images.reading.page
        if isinstance(page, str) or not self.headers:
            return []
        most = max(self.headers, key=lambda position: self.headers[position].pages)
        count = self.headers[most].pages
        if count == 1:
            return []
        return [
            f"{self.images.name(most)} has {count} pages, of which data.page={page} is read. "
            "data.page=all makes them channels."
        ]


def write_extremes(images: ImageList, folder: Path, *, skips_damaged: bool) -> Metadata:
    """Write the smallest and the largest value of each image, (n, 2) float64; 8 bits have nan.

    Returns:
        The names of the images that cannot be read, as `unreadable`.

    Raises:
        CorruptImage: an image cannot be read, and damaged ones are not skipped.
    """
    extremes = np.full((len(images), 2), np.nan)
    unreadable: list[str] = []

    def read(i: int) -> None:
        try:
            values = images.reading.read_values(images.file(i), images.path(i))
        except CorruptImage:
            if not skips_damaged:
                raise
            unreadable.append(images.name(i))
            return
        values = values[np.isfinite(values)]
        if values.dtype != np.uint8 and values.size:
            extremes[i] = values.min(), values.max()

    decode_all(len(images), read)
    np.save(folder / EXTREMES, extremes)
    return {"unreadable": unreadable}


def find_range(extremes: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest of all values.

    If all values are equal, the largest is one more, so that they become black.

    Args:
        extremes: the array of `write_extremes`.
    """
    deep_images = extremes[np.isfinite(extremes).all(1)]
    if not len(deep_images):
        return 0.0, 1.0
    low = float(deep_images[:, 0].min())
    high = float(deep_images[:, 1].max())
    return low, high if high > low else low + 1


def measure_colours(
    images: ImageList, positions: list[int], framing: Framing, threads: int = THREADS
) -> Metadata:
    """Return the mean and the deviation of each channel, and two percentiles as `filled`.

    Pixels are from 0 to 1.

    Args:
        threads: with 1 the images are opened in order.

    Raises:
        CorruptImage: no image can be read.
    """
    moments = np.zeros((len(positions), 2, framing.channels))
    samples = np.full((len(positions), PIXELS_OF_IMAGE), np.nan, np.float32)
    damaged: list[CorruptImage] = []

    def read(i: int) -> None:
        try:
            image = images.open(positions[i])[0]
        except CorruptImage as error:
            damaged.append(error)
            return
        pixels = to_array(framing.square(image)).astype(np.float64) / 255
        moments[i] = pixels.mean((0, 1)), (pixels**2).mean((0, 1))
        values = pixels.ravel()
        indices = np.linspace(0, len(values) - 1, PIXELS_OF_IMAGE).astype(int)
        samples[i] = values[indices]

    decode_all(len(positions), read, threads)
    if len(damaged) == len(positions):
        raise damaged[0]
    is_read = np.isfinite(samples[:, 0])
    mean, square = moments[is_read].mean(0)
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    low, high = np.percentile(samples[is_read], PERCENTILES)
    return {
        "mean": mean.tolist(),
        # The deviation of equal values is 1, so that they are only shifted.
        "std": [value if value > 1e-6 else 1.0 for value in deviation.tolist()],
        "filled": [float(low), float(high)],
    }


def describe_narrow_range(percentiles: Any, value_range: Any) -> str:
    """Return a sentence if most values lie in a small part of their range, else "".

    Args:
        percentiles: a low and a high percentile; black is 0 and white is 1.
        value_range: black and white, see Reading.
    """
    low, high = percentiles
    if isinstance(value_range, str) or value_range is None or high - low >= LEAST_SHARE:
        return ""
    black, white = value_range
    first, last = (black + share * (white - black) for share in (low, high))
    return (
        f"99 % of the values are from {first:.6g} to {last:.6g}, which is less than a tenth of the "
        f"range {black:.6g} to {white:.6g}. If the others mean nothing, give "
        f"data.range=[{first:.6g},{last:.6g}]."
    )
