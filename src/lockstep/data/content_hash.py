"""Hash a data set. Ranks compare their images by the hash, and a resume compares them with before.

The hash is over the bytes of the files and not over decoded pixels. So it is equal in every
process, on the array path and the loader path, and with every image decoder. The names and folders
of files do not count.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import CorruptImage
from lockstep.data.listing import hash_json

# Raise this number with any change of a hash, here or in `add_drawn_test`. Hashes of two methods
# are not compared. Checkpoints of version 2.0.0 name no method.
HASH_METHOD = 3
WHOLE_BYTES = 64 * 2**20
WHOLE_IMAGES = 2048
SAMPLED_IMAGES = 1024
PIECE_BYTES = 64 * 2**10
THREADS = 8  # reads on a network disk wait most of the time


def add_drawn_test(data_hash: str, test: np.ndarray) -> str:
    """Return the hash of the same data with these drawn test images."""
    return hash_json([data_hash, test.tolist()])


def hash_files(image_list: Any) -> str:
    """Return the hash of an ImageList: splits, targets, sizes and content of the files.

    At most 2,048 images of at most 64 MiB in all are hashed whole. Of larger data, 1,024 evenly
    spaced images are hashed, at most 64 KiB from the middle of each. Then a single image that is
    replaced by one of the same size may go unnoticed. Masks count as images do.
    """
    arrays = {"targets": image_list.target_values, "sizes": image_list.num_bytes}
    arrays |= {f"column {name}": values for name, values in image_list.columns.items()}
    with ThreadPoolExecutor(THREADS) as pool:
        num_bytes = image_list.num_bytes.sum()
        if image_list.mask_names:
            mask_sizes = list(
                pool.map(lambda i: _file_size(image_list.mask_path(i)), range(len(image_list)))
            )
            arrays["mask sizes"] = np.array(mask_sizes, np.int64)
            num_bytes += sum(mask_sizes)

        digest = _begin_digest(image_list.class_names, image_list.split_ids, arrays)
        is_whole = len(image_list) <= WHOLE_IMAGES and num_bytes <= WHOLE_BYTES
        positions = range(len(image_list)) if is_whole else _sample_positions(len(image_list))
        for content in pool.map(lambda i: _digest_content(image_list, i, is_whole), positions):
            digest.update(content)
    return digest.hexdigest()


def hash_arrays(
    images: Iterable[np.ndarray],
    targets: Mapping[str, np.ndarray],
    class_names: Sequence[str],
    split_ids: np.ndarray,
) -> str:
    """Return the hash of images in memory: splits, targets and every pixel."""
    digest = _begin_digest(class_names, split_ids, targets)
    for image in images:
        digest.update(np.ascontiguousarray(image).data)
    return digest.hexdigest()


def _begin_digest(
    class_names: Sequence[str], split_ids: np.ndarray, arrays: Mapping[str, np.ndarray]
) -> Any:
    """Begin a digest with class names, splits, and the arrays in the order of their names."""
    digest = hashlib.sha256(json.dumps([list(class_names), len(split_ids)]).encode())
    digest.update(np.ascontiguousarray(split_ids, np.int8).data)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data)
    return digest


def _sample_positions(num_images: int) -> Sequence[int]:
    count = min(num_images, SAMPLED_IMAGES)
    return np.linspace(0, num_images - 1, count).astype(int).tolist()


def _file_size(path: Path) -> int:
    """Return the number of bytes of a file; 0 if it cannot be read.

    The fault is reported when the file is needed.
    """
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _digest_content(image_list: Any, i: int, is_whole: bool) -> bytes:
    """Return a digest of an image and its mask, or of the middle of both.

    A file that cannot be read gets a digest of its own. It is reported when it is needed.
    """
    digest = hashlib.blake2b()
    try:
        part = _choose_bytes(int(image_list.num_bytes[i]), is_whole)
        digest.update(image_list.read_bytes(i, *part))
        if image_list.mask_names:
            path = image_list.mask_path(i)
            first, count = _choose_bytes(_file_size(path), is_whole)
            with path.open("rb") as file:
                file.seek(first)
                digest.update(file.read(count))
    except (CorruptImage, OSError):
        digest.update(b"cannot be read")
    return digest.digest()


def _choose_bytes(num_bytes: int, is_whole: bool) -> tuple[int, int]:
    """Return the first byte of a file that is read, and the number of bytes."""
    count = num_bytes if is_whole else min(num_bytes, PIECE_BYTES)
    return (num_bytes - count) // 2, count
