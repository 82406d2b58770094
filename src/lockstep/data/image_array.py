"""All images of a data set in one flat uint8 array, laid out so that a batch of random crops and flips is one gather.

Rows of pixels (height, width, channel) lie behind one another with a border of black pixels between them: the right
border of a row is the left border of the next, and the bottom border of an image the top border of the next. A crop
that starts anywhere in the border is then a strided window of the array, and `index_select` over all overlapping
windows cuts a whole batch at once, on the CPU and on a GPU. Where there is room a mirrored copy stands behind the
images, so that a flip is another start and costs nothing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Places = Tensor | np.ndarray
"""On the CPU arrays: NumPy's small operations cost a third of torch's."""


@dataclass(frozen=True)
class Layout:
    """Where each image lies in the flat array.

    Args:
        size: side of an image.
        padding: width of the black border that a crop may reach into.
        num_mirrored: how many of the first images have a mirrored copy.
    """

    size: int
    channels: int
    num_images: int
    padding: int = 0
    num_mirrored: int = 0

    @property
    def row_pixels(self) -> int:
        return self.size + self.padding

    @property
    def image_pixels(self) -> int:
        return self.row_pixels * self.row_pixels

    @property
    def first_pixel(self) -> int:
        """Where the first image's own pixels start, behind its border."""
        return self.padding * self.row_pixels + self.padding

    @property
    def num_bytes(self) -> int:
        return ((self.num_images + self.num_mirrored) * self.image_pixels + self.first_pixel) * self.channels


def write_images(flat: np.ndarray, images: np.ndarray, layout: Layout) -> None:
    """Fill a zeroed flat array (layout.num_bytes,) with images (n, size, size, channels)."""
    own = own_pixels(flat, layout)
    own[: layout.num_images] = images
    own[layout.num_images :] = images[: layout.num_mirrored, :, ::-1]


def own_pixels(flat: np.ndarray, layout: Layout) -> np.ndarray:
    """The images and their mirrored copies within a flat array, without borders: (n, size, size, channels)."""
    row, channels = layout.row_pixels * layout.channels, layout.channels
    return np.lib.stride_tricks.as_strided(
        flat[layout.first_pixel * channels :],
        (layout.num_images + layout.num_mirrored, layout.size, layout.size, channels),
        (layout.row_pixels * row, row, channels, 1),
    )


class ImageArray:
    """The flat array of a layout, from which windows of one size are cut.

    Args:
        flat: (layout.num_bytes,) uint8.
        window: side of a window; starts range from 0 to size + 2·padding − window.
    """

    def __init__(self, flat: Tensor, layout: Layout, window: int) -> None:
        self.flat, self.layout, self.window = flat, layout, window
        row_bytes, window_bytes = layout.row_pixels * layout.channels, window * layout.channels
        span = (window - 1) * row_bytes + window_bytes  # what lies between the rows is gathered too, which is faster
        num_starts = (flat.numel() - span) // layout.channels + 1
        self._spans = flat.as_strided((num_starts, span), (layout.channels, 1))
        self._rows = (window, window_bytes), (span, row_bytes, 1)

    @classmethod
    def open(cls, path: Path, layout: Layout, window: int) -> "ImageArray":
        """Map a file; all ranks of a node share its pages. (Copy-on-write, as torch warns of read-only arrays.)"""
        return cls(torch.from_numpy(np.memmap(path, np.uint8, "c")), layout, window)

    @classmethod
    def of_batch(cls, images: Tensor, padding: int, window: int) -> "ImageArray":
        """A batch (n, size, size, channels) uint8 laid out on its own device, without a mirrored copy."""
        n, size, _, channels = images.shape
        layout = Layout(size, channels, n, padding)
        if padding:
            bordered = images.new_zeros(n, layout.row_pixels, layout.row_pixels, channels)
            bordered[:, :size, :size] = images
            flat = torch.cat([images.new_zeros(layout.first_pixel * channels), bordered.flatten()])
        else:
            flat = images.flatten()
        return cls(flat, layout, window)

    @property
    def num_bytes(self) -> int:
        return self.flat.numel()

    def to(self, device: torch.device) -> "ImageArray":
        return ImageArray(self.flat.to(device), self.layout, self.window)

    def windows(self, index: Places, draws: Places | list[Any]) -> Tensor:
        """(n, window, window, channels) uint8, cut and flipped.

        Args:
            index: (n,) int64 images; those with a flip must have a mirrored copy, or none has one.
            draws: (3, n) int64 rows dy, dx (starts within the bordered image) and flip (0 or 1).
        """
        return self.rows(index, draws).view(-1, self.window, self.window, self.layout.channels)

    def rows(self, index: Places, draws: Places | list[Any]) -> Tensor:
        """`windows` with a row's pixels in one axis: (n, window, window·channels), not contiguous."""
        start = self.starts(index, draws)
        size, strides = self._rows
        cut = self._spans.index_select(0, torch.as_tensor(start)).as_strided((len(start), *size), strides)
        if not self.layout.num_mirrored:
            images, flip = cut.view(-1, self.window, self.window, self.layout.channels), torch.as_tensor(draws[2])
            if flip.device.type == "cpu":
                mirror_some(images, flip)
            else:
                return mirrored(images, flip).flatten(2)
        return cut

    def starts(self, index: Any, draws: Any) -> Any:
        """First pixel of each window, from two arrays or two tensors.

        Crop, then flip, as torchvision's usual order has it: the mirror image's window starts at the other end.
        """
        layout, (dy, dx, flip) = self.layout, draws
        if layout.num_mirrored:
            last = layout.size + 2 * layout.padding - self.window
            index, dx = index + flip * layout.num_images, dx + flip * (last - 2 * dx)
        return index * layout.image_pixels + dy * layout.row_pixels + dx


def mirror_some(images: Tensor, flip: Tensor) -> None:
    """Left to right, in place, where flip (n,) is 1; how many those are has to be read first."""
    flipped = flip.nonzero().squeeze(1)
    if len(flipped):
        images[flipped] = images[flipped].flip(2)


def mirrored(images: Tensor, flip: Tensor) -> Tensor:
    """The same as a copy, where reading a number would wait for the device: of (n, height, width, channels)."""
    return torch.where((flip > 0).view(-1, 1, 1, 1), images.flip(2), images)
