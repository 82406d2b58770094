"""Enlarged images straight from the image array, compiled for the CPU: each result is written to memory once.

What torch's operations do in several passes over images of 224 pixels (resampling.grow) is bound by the memory. Here
one image at a time stays in the first-level cache, and each thread takes its share of the batch.
"""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch
from torch import Tensor


class Taps:
    """Which two source pixels each pixel of the enlarged and bordered image mixes, along one side.

    Args:
        matrix: (resize, source) of resize_matrix, source ≥ 2, with two neighbours at most in each row.
        padding: black pixels on both sides.
    """

    def __init__(self, matrix: np.ndarray, padding: int) -> None:
        resize, source = matrix.shape
        first = np.minimum((matrix > 0).argmax(1), source - 2)
        rows = np.arange(resize)
        self.first = np.pad(first, padding).astype(np.int64)
        self.near = np.pad(matrix[rows, first], padding)
        self.far = np.pad(matrix[rows, first + 1], padding)


def enlarge(
    flat: Tensor,
    starts: np.ndarray,
    crops: np.ndarray,
    row_bytes: int,
    source: int,
    taps: Taps,
    scale: Tensor,
    shift: Tensor,
    out: Tensor,
) -> None:
    """Enlarge, crop and normalise the images (source, source, channels) that start at `starts` of a uint8 array.

    Args:
        starts: (n,) int64 bytes.
        crops: (2, n) int64 rows dy, dx: where each result starts in the enlarged and bordered image.
        row_bytes: from one row of an image to the next.
        scale: (channels,) float32 for pixels from 0 to 255.
        shift: likewise, added afterwards.
        out: (n, channels, height, width) float32, written.
    """
    arrays = flat.numpy(), starts, crops, row_bytes, source, taps.first, taps.near, taps.far
    rest = scale.numpy(), shift.numpy(), out.numpy()
    threads = min(torch.get_num_threads(), len(starts))
    bounds = [len(starts) * i // threads for i in range(threads + 1)]
    if threads == 1:
        _enlarge(*arrays, *rest, 0, len(starts))
        return
    with ThreadPoolExecutor(threads) as pool:  # the kernel holds no lock; starting threads is 1 % of such a batch
        list(pool.map(lambda first, end: _enlarge(*arrays, *rest, first, end), bounds[:-1], bounds[1:]))


@numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _enlarge(flat, starts, crops, row_bytes, source, first, near, far, scale, shift, out, begin, end):  # type: ignore[no-untyped-def]
    _, channels, height, width = out.shape
    row = np.empty(source, np.float32)
    wide = np.empty((source, width), np.float32)
    for i in range(begin, end):
        top, left = crops[0, i], crops[1, i]
        pixel = first[left : left + width]
        near_x, far_x = near[left : left + width], far[left : left + width]
        for c in range(channels):
            for y in range(source):
                pixels = flat[starts[i] + y * row_bytes + c :]
                for x in range(source):
                    row[x] = np.float32(pixels[x * channels]) * scale[c]
                mixed = wide[y]
                for x in range(width):
                    mixed[x] = row[pixel[x]] * near_x[x] + row[pixel[x] + 1] * far_x[x]
            for y in range(height):
                above, near_y, far_y = first[top + y], near[top + y], far[top + y]
                upper, lower, result = wide[above], wide[above + 1], out[i, c, y]
                for x in range(width):
                    result[x] = upper[x] * near_y + lower[x] * far_y + shift[c]
