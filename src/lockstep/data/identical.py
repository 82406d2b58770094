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
    samples = np.ascontiguousarray(flat[index][:, columns] if len(index) < len(flat) else flat[:, columns])
    keys = samples.view(f"V{samples.shape[1]}").ravel().tolist()
    return _groups(zip(index.tolist(), keys), lambda i: flat[i].tobytes())


def identical_files(images: ImageList, index: np.ndarray, limit: int | None = MAX_COMPARED) -> list[list[int]] | None:
    """Return groups of positions (out of `index`) whose files are equal; None: there are more than `limit` to compare.

    Only images of equal size are read, and of those at first only the end.
    """
    sizes, counts = np.unique(images.size[index], return_counts=True)
    index = index[np.isin(images.size[index], sizes[counts > 1])]
    if limit is not None and len(index) > limit:
        return None
    return _groups(((i, (int(images.size[i]), images.read(i)[-SAMPLE_BYTES:])) for i in index.tolist()), images.read)


def _groups(keyed: Iterable[tuple[int, Hashable]], content: Callable[[int], bytes]) -> list[list[int]]:
    same_key: dict[Hashable, list[int]] = {}
    for i, key in keyed:
        same_key.setdefault(key, []).append(i)
    found = []
    for candidates in same_key.values():
        if len(candidates) > 1:
            same: dict[bytes, list[int]] = {}
            for i in candidates:
                same.setdefault(hashlib.blake2b(content(i)).digest(), []).append(i)
            found += [group for group in same.values() if len(group) > 1]
    return found


def describe(
    groups: list[list[int]], labels: np.ndarray, splits: np.ndarray, name: Callable[[int], str]
) -> dict[str, list[str]]:
    """Return sentences for the log, each with the pairs of images that it counts, "a = b".

    Args:
        labels: (n,) the label of each image; splits: (n,) 0 train, 1 val, 2 test.
    """
    pairs: dict[str, list[str]] = {"test": [], "validation": [], "labels": []}
    for group in groups:
        trained = [i for i in group if splits[i] == TRAIN]
        for i in group if trained else ():
            if splits[i] in (VAL, TEST):
                pairs["test" if splits[i] == TEST else "validation"].append(f"{name(i)} = {name(trained[0])}")
        other = next((i for i in group if labels[i] != labels[group[0]]), None)
        if other is not None:
            pairs["labels"].append(f"{name(group[0])} = {name(other)}")
    found = {
        f"{len(pairs[kind])} {kind} images are identical to training images": pairs[kind]
        for kind in ("test", "validation")
    }
    found[f"{len(pairs['labels'])} images occur under two labels"] = pairs["labels"]
    return {sentence: lines for sentence, lines in found.items() if lines}
