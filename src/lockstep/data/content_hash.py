"""One hash of a data set, for ranks that compare their images and for runs that are resumed.

It is equal in every process, on the array path and the loader path, and under every image
decoder, because it reads the bytes of the files and no decoded pixels. The names and folders of
files do not count.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from lockstep.data.decoding import CorruptImage
from lockstep.data.listing import hash_of_json

# Hashes of two methods cannot be compared. Checkpoints of version 2.0.0 name no method.
METHOD = 2
WHOLE_BYTES = 64 * 2**20
WHOLE_IMAGES = 2048
SAMPLED_IMAGES = 1024
PIECE_BYTES = 64 * 2**10
THREADS = 8  # reads on a network disk wait most of the time


def with_drawn_test(data_hash: str, test: np.ndarray) -> str:
    """Return the hash of the same data with these drawn test images."""
    return hash_of_json([data_hash, test.tolist()])


def hash_of_files(images: Any) -> str:
    """Return the hash of an ImageList: splits, targets, sizes and content of the files.

    The content is all bytes of the files if they are at most 64 MiB in at most 2,048 images.
    Of more, it is that of 1,024 evenly spaced images, at most 64 KiB from the middle of each. A
    single image that is replaced by one of the same size may go unnoticed then. Masks count as
    images do.
    """
    arrays = {"targets": images.numbers, "sizes": images.size}
    arrays |= {f"column {name}": values for name, values in images.columns.items()}
    digest = _started(images.class_names, images.splits, arrays)
    positions = _positions(images.size)
    is_whole = len(positions) == len(images)
    with ThreadPoolExecutor(THREADS) as pool:
        for piece in pool.map(lambda i: _content(images, i, is_whole), positions):
            digest.update(piece)
    return digest.hexdigest()


def hash_of_arrays(
    images: Iterable[np.ndarray],
    targets: Mapping[str, np.ndarray],
    class_names: Sequence[str],
    splits: np.ndarray,
) -> str:
    """Return the hash of images in memory: splits, targets and every pixel."""
    digest = _started(class_names, splits, targets)
    for image in images:
        digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


def _started(
    class_names: Sequence[str], splits: np.ndarray, arrays: Mapping[str, np.ndarray]
) -> Any:
    """Return a digest of the class names, the splits and the arrays in the order of their names."""
    digest = hashlib.sha256(json.dumps([list(class_names), len(splits)]).encode())
    digest.update(np.ascontiguousarray(splits, np.int8).data)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data)
    return digest


def _positions(sizes: np.ndarray) -> list[int]:
    if len(sizes) <= WHOLE_IMAGES and sizes.sum() <= WHOLE_BYTES:
        return list(range(len(sizes)))
    count = min(len(sizes), SAMPLED_IMAGES)
    return np.linspace(0, len(sizes) - 1, count).astype(int).tolist()


def _content(images: Any, i: int, is_whole: bool) -> bytes:
    """Return a digest of an image and its mask. What cannot be read is named when it is needed."""
    digest = hashlib.blake2b()
    size = int(images.size[i])
    count = size if is_whole else min(size, PIECE_BYTES)
    try:
        digest.update(images.read(i, (size - count) // 2, count))
        if images.mask_names:
            digest.update(images.mask_path(i).read_bytes())
    except (CorruptImage, OSError):
        digest.update(b"cannot be read")
    return digest.digest()
