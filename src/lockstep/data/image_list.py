"""Labelled images in the order in which a run counts them: made by a source, kept on the node, shared by its ranks."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.data.image_set import LABELS, fingerprint
from lockstep.data.image_tree import natural_key
from lockstep.data.node_cache import META, Content, cached_within_lock, file_identity, folder_lock
from lockstep.data.places import Places
from lockstep.runs.errors import UserError

SPLITS = ("train", "val", "test")
SPLIT_OF = {"train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
SETTLED_NS = 2 * 10**9  # a file system's clock may tick so slowly that a later change shows the same time
MAX_LABEL = 255  # characters


@dataclass(frozen=True)
class ImageList:
    """First the images to fit on, then those to validate, then those to test on.

    labels: (n,) int64; counts: of the three parts, the last 0 where test images are to be drawn from the first;
    watched: folders and files that list the images: where they are as they were, so is the list;
    skipped: what was left out, and why.
    """

    class_names: list[str]
    labels: np.ndarray
    counts: tuple[int, int, int]
    places: Places
    watched: Sequence[str | Path] = ()
    skipped: list[str] = field(default_factory=list)


def sorted_out(
    words: Sequence[str],
    splits: np.ndarray,
    where: Callable[[int], str],
    source: object,
    names: Sequence[str] | None = None,
    *,
    needs_training: bool = True,
) -> tuple[list[str], np.ndarray, tuple[int, int, int], np.ndarray]:
    """Class names, labels, counts and order (n,) of images whose classes and splits stand in a table.

    Args:
        words: the class of each; splits: (n,) integers, 0 train, 1 val, 2 test.
        where: where an image is listed, for errors; source: all of it.
        names: the order of classes; None: as people count.
        needs_training: every class needs an image to train on; else the classes are those of all images.
    Raises:
        UserError: nothing to train on, a class that only validation or test has, a validation part without a test.
    """
    order = np.argsort(splits, kind="stable")
    counts = np.bincount(splits, minlength=3)
    if needs_training and not counts[0]:
        raise UserError(f"{source} lists no image to train on.")
    if needs_training and counts[1] and not counts[2]:
        raise UserError(f"{source} has images to validate on and none to test on: call a part of them test.")
    too_long = next((i for i in order if len(words[i]) > MAX_LABEL), None)
    if too_long is not None:
        raise UserError(f"{where(too_long)}: a label of more than {MAX_LABEL} characters.")
    trained = {words[i] for i in (order[: counts[0]] if needs_training else order)}
    found = sorted(trained, key=natural_key) if names is None else [name for name in names if name in trained]
    places = {name: place for place, name in enumerate(found)}
    for i in order[counts[0] :]:
        if words[i] not in places:
            raise UserError(
                f"{where(i)}: the class {words[i]} has no image to train on; those that have: {', '.join(found[:20])}."
            )
    labels = np.array([places[words[i]] for i in order], np.int64)
    return found, labels, (int(counts[0]), int(counts[1]), int(counts[2])), order


def kept_list(folder: Path, make: Callable[[], ImageList], *, exact: bool) -> tuple[ImageList, Content]:
    """The list that lies in a cache folder, made where there is none or it is out of date; and what it is known by.

    Content: `identity` changes with any name, size, time or label; `data_hash` with names and sizes alone.

    Args:
        exact: look at every file's size and time; else at those of what is watched.
    """

    def build(part: Path) -> Content:
        settled = time.time_ns() - SETTLED_NS
        images = make()
        images.places.save(part)
        np.save(part / LABELS, images.labels)
        watched = [_stamp(path, settled) for path in images.watched]
        return {
            "class_names": images.class_names,
            "counts": images.counts,
            "folder": str(images.places.folder),
            "watched": watched,
            "skipped": images.skipped,
            "identity": _identity(images),
            "data_hash": hash_of_names(images.places),
        }

    def is_current(meta: Content) -> bool:
        try:
            if any(file_identity(Path(stamp[0])) != stamp for stamp in meta["watched"]):
                return False
        except OSError:
            return False
        return not exact or Places.kept(folder, Path(meta["folder"])).as_listed()

    with folder_lock(folder):  # another rank may list anew what this one has not read yet
        meta = cached_within_lock(folder, build, is_current)
        places, labels = Places.kept(folder, Path(meta["folder"])), np.load(folder / LABELS)
    return ImageList(meta["class_names"], labels, tuple(meta["counts"]), places, (), meta["skipped"]), meta


def forget(folder: Path) -> None:
    """A list that proved to be out of date: the next start makes it anew."""
    (folder / META).unlink(missing_ok=True)


def hash_of_names(places: Places) -> str:
    """Of images that nobody has opened."""
    return fingerprint([places.relative_names(), places.size.tolist()])


def _identity(images: ImageList) -> str:
    digest = hashlib.sha256(fingerprint([images.class_names, images.counts]).encode())
    for array in (images.labels, *images.places.arrays().values()):
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _stamp(path: str | Path, settled: int) -> list[object]:
    stamp = file_identity(Path(path))
    return stamp if stamp[2] < settled else [*stamp, "changed just before it was listed"]
