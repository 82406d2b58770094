"""Find images that occur twice: in two splits, or under two labels."""

import hashlib
from collections.abc import Callable, Hashable, Iterable

import numpy as np

from lockstep.data.listing import TEST, TRAIN, VAL, ImageList

SAMPLE_BYTES = 64  # of an image; only images that share the sample are compared as a whole
MAX_COMPARED = 50_000  # files of equal size that a start may open


def identical_arrays(images: np.ndarray, index: np.ndarray) -> list[list[int]]:
    """Return groups of positions (out of `index`) whose pixels are equal.

    Args:
        images: (n, size, size, channels) uint8.
    """
    flat = images.reshape(len(images), -1)
    columns = np.linspace(0, flat.shape[1] - 1, min(SAMPLE_BYTES, flat.shape[1])).astype(int)
    samples = np.ascontiguousarray(flat[index[:, None], columns])
    return _groups(zip(index.tolist(), samples.view(f"V{len(columns)}").ravel().tolist()), lambda i: flat[i].tobytes())


def identical_files(images: ImageList, index: np.ndarray, limit: int | None = MAX_COMPARED) -> list[list[int]] | None:
    """Return groups of positions (out of `index`) whose files are equal; None: more than `limit` have equal sizes."""
    sizes, counts = np.unique(images.size[index], return_counts=True)
    index = index[np.isin(images.size[index], sizes[counts > 1])]
    if limit is not None and len(index) > limit:
        return None
    return _groups(((i, (int(images.size[i]), images.read(i)[-SAMPLE_BYTES:])) for i in index.tolist()), images.read)


def _groups(keyed: Iterable[tuple[int, Hashable]], content: Callable[[int], bytes]) -> list[list[int]]:
    same_key: dict[Hashable, list[int]] = {}
    for i, key in keyed:
        same_key.setdefault(key, []).append(i)
    same: dict[Hashable, list[int]] = {}
    for key, candidates in same_key.items():
        for i in candidates if len(candidates) > 1 else ():
            same.setdefault((key, hashlib.blake2b(content(i)).digest()), []).append(i)
    return [group for group in same.values() if len(group) > 1]


def describe(
    groups: list[list[int]], labels: np.ndarray, splits: np.ndarray, name: Callable[[int], str]
) -> dict[str, list[str]]:
    """Return sentences for the log, each with the pairs of images that it counts, "a = b".

    Args:
        labels, splits: (n,), of all images; splits are 0 train, 1 val, 2 test.
    """
    pairs: dict[str, list[tuple[int, int]]] = {"test": [], "validation": [], "labels": []}
    for group in groups:
        trained = [i for i in group if splits[i] == TRAIN]
        for kind, split in (("test", TEST), ("validation", VAL)) if trained else ():
            pairs[kind] += [(i, trained[0]) for i in group if splits[i] == split]
        pairs["labels"] += [(group[0], i) for i in group if labels[i] != labels[group[0]]][:1]
    sentences = {
        "test": "{} test images are identical to training images",
        "validation": "{} validation images are identical to training images",
        "labels": "{} images occur under two labels",
    }
    return {
        sentence.format(len(pairs[kind])): [f"{name(a)} = {name(b)}" for a, b in pairs[kind]]
        for kind, sentence in sentences.items()
        if pairs[kind]
    }
