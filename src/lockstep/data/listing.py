"""A list of labelled images in files, tables or shards, made before any image is opened.

Every source uses the same names of splits and the same order of classes.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import SUFFIXES, CorruptImage, open_mask
from lockstep.runs.errors import UserError

TRAIN, VAL, TEST = 0, 1, 2
SPLITS = ("train", "val", "test")
SPLIT_OF = {  # the names that Hugging Face's datasets know, in any case
    "train": TRAIN, "training": TRAIN, "trainval": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "dev": VAL,
    "test": TEST, "testing": TEST, "eval": TEST, "evaluation": TEST,
    "publictest": VAL, "privatetest": TEST,  # Kaggle's
}  # fmt: skip
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")
SYSTEM_NAMES = {  # of macOS, Synology, Linux, Windows, Python
    "__MACOSX", "@eaDir", "#recycle", "#snapshot", "lost+found", "$RECYCLE.BIN", "System Volume Information",
    "__pycache__",
}  # fmt: skip
LeftOut = dict[str, list[str]]
"""Names of what was not taken, by reason: `{"hidden images": ["cat/._1.jpg"]}`."""


@dataclass(slots=True)
class Item:
    """One image of a source."""

    name: str  # the path of its file relative to the source's folder, or what messages call it
    label: Any = ""  # the name of its class; a number; the path of its mask; or several numbers
    split: int = TRAIN
    size: int = 0  # bytes of the encoded image
    mtime: int = 0  # when the file was changed, in nanoseconds
    group: str | None = None  # what it shares with images that stay in the same split
    file: str | None = None  # the file that holds it; None: the one of its name
    start: int = 0  # its first byte there


class ImageList:
    """A list of n images: first those to train on, then those to validate on, then those to test on.

    Attributes:
        targets: (n,) int64 classes, (n,) float32 numbers or (n, C) float32 labels; zeros where there are masks.
        class_names: in the order of the classes or labels.
        splits: (n,) int8, ascending: 0 train, 1 val, 2 test.
        groups: (n,) int64, images that stay in one split together; None: each image is alone.

    Args:
        folder: what names and files are relative to.
        target: what labels are: class, number, or mask, a path relative to `folder`.
        label_columns: with several labels, their names.
        left_out: for the log.
    """

    def __init__(
        self, folder: Path, items: Sequence[Item], *, target: str = "class", label_columns: Sequence[str] = (),
        left_out: LeftOut | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.left_out = folder, left_out or {}
        if not items:
            raise UserError(f"{folder} has no images (left out: {counts_of(self.left_out)}).")
        items = sorted(items, key=lambda item: item.split)
        fields = ("label", "file", "group", "name", "split", "size", "mtime", "start")
        labels, files, groups, names, *numbers = ([getattr(item, field) for item in items] for field in fields)
        # Arrays of bytes, which worker processes share; they would copy strings one by one.
        self._names = np.array([os.fsencode(name) for name in names])
        self.splits = np.array(numbers[0], np.int8)
        self.size, self._mtime, self._start = np.array(numbers[1:], np.int64)
        self._files = None if None in files else np.unique(files, return_inverse=True)
        self.groups = None if None in groups else np.unique(groups, return_inverse=True)[1]
        self.has_masks, self.class_names = target == "mask", list(label_columns)
        self._masks = np.array([os.fsencode(label) for label in labels] if self.has_masks else [])
        if self.has_masks:
            self.targets = np.zeros(len(items), np.int64)
        elif label_columns or target == "number":
            shape = (len(label_columns),) if label_columns else ()
            self.targets = np.array([_number(folder, item, shape) for item in items], np.float32)
        else:
            tidy = tidy_labels(set(labels))
            self.class_names = ordered_classes(tidy.values())
            number_of = {name: number for number, name in enumerate(self.class_names)}
            self.targets = np.array([number_of[tidy[label]] for label in labels], np.int64)

    def __len__(self) -> int:
        return len(self.splits)

    def name(self, i: int) -> str:
        return os.fsdecode(self._names[i])

    def path(self, i: int) -> str:
        """Return the image's name with the folder before it."""
        return str(self.folder / self.name(i))

    def read(self, i: int) -> bytes:
        """Return the encoded image; raise CorruptImage if it cannot be read, or the file has become shorter."""
        size, file = int(self.size[i]), self._files[0][self._files[1][i]] if self._files else self.path(i)
        try:
            with open(file, "rb") as opened:
                opened.seek(int(self._start[i]))
                data = opened.read(size)
        except OSError as error:
            raise CorruptImage(f"{self.path(i)} cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise CorruptImage(f"{self.path(i)} is shorter than when it was listed")
        return data

    def read_mask(self, i: int) -> np.ndarray:
        """Return the class of each pixel, (height, width) uint8."""
        return open_mask(self.folder / os.fsdecode(self._masks[i]))

    @property
    def identity(self) -> str:
        """A hash that changes with any name, size, time, target or split."""
        stats = [os.stat(self.folder / os.fsdecode(mask)) for mask in self._masks]
        masks = [(os.fsdecode(mask), each.st_size, each.st_mtime_ns) for mask, each in zip(self._masks, stats)]
        arrays = [each.tolist() for each in (self._mtime, self.targets, self.splits)]
        return fingerprint([self.content_hash(), str(self.folder), self.class_names, masks, arrays])

    def content_hash(self) -> str:
        """Return a hash of names and sizes, for images that nobody has opened."""
        return fingerprint([[os.fsdecode(name) for name in self._names], self.size.tolist()])


def _number(folder: Path, item: Item, shape: tuple[int, ...]) -> np.ndarray:
    with suppress(TypeError, ValueError):
        number = np.asarray(item.label, np.float32)
        if np.isfinite(number).all() and number.shape == shape:
            return number
    raise UserError(f"{folder / item.name}: the target {str(item.label)[:50]} is not a number.")


def tidy_labels(labels: Iterable[str]) -> dict[str, str]:
    r"""Return the class name for each spelling: one line, no blanks around it, "1" for "1.0", "\xff" for no UTF-8."""
    tidy = {label: os.fsencode(label).decode("utf-8", "backslashreplace") for label in labels}
    tidy = {label: re.sub(r"[\x00-\x1f\x7f]", " ", name).strip() for label, name in tidy.items()}
    if all(WHOLE_NUMBER.fullmatch(name) for name in tidy.values()):
        return {label: name.partition(".")[0] for label, name in tidy.items()}
    return {label: unicodedata.normalize("NFC", name) for label, name in tidy.items()}


def splits_in(name: str) -> list[int]:
    """Return the splits that words of a name say, as of train_images, testset or val-0."""
    words = (re.sub("(set|data|split)$", "", word) for word in re.split("[^a-z]+", name.lower()))
    return [SPLIT_OF[word] for word in words if word in SPLIT_OF]


def ordered_classes(names: Iterable[str]) -> list[str]:
    """Sort class names: whole numbers as numbers, anything else as torchvision's ImageFolder does."""
    distinct = sorted(set(names))
    return sorted(distinct, key=float) if all(WHOLE_NUMBER.fullmatch(name) for name in distinct) else distinct


def natural_key(name: str) -> list[str | int]:
    """Sort img9 before img10."""
    parts: list[str | int] = list(re.split("([0-9]+)", name))  # text and digits in turn
    parts[1::2] = map(int, parts[1::2])
    return parts


def files_below(
    root: Path, left_out: LeftOut, folders: list[str] | None = None, suffixes: Collection[str] = SUFFIXES
) -> list[Item]:  # fmt: skip
    """Return all images (or files with other endings) at any depth below root, in natural order of their names.

    Args:
        left_out: gets the names of other files, and of hidden images.
        folders: gets the paths of all folders.
    """
    found: list[Item] = []

    def collect(folder: str, above: list[tuple[int, int]]) -> None:
        stat = os.stat(root / folder)
        if (place := (stat.st_dev, stat.st_ino)) in above:
            left_out.setdefault("links to a folder above", []).append(folder)
            return
        if folders is not None and folder:
            folders.append(folder)
        for entry in list(os.scandir(root / folder)):
            name, suffix = f"{folder}/{entry.name}".lstrip("/"), os.path.splitext(entry.name.lstrip("."))[1].lower()
            if entry.name.startswith(".") or entry.name in SYSTEM_NAMES:
                if suffix in suffixes:
                    left_out.setdefault("hidden images", []).append(name)
            elif entry.is_dir():
                collect(name, [*above, place])
            elif suffix not in suffixes:
                left_out.setdefault(f"{suffix or 'nameless'} files", []).append(name)
            elif not entry.is_file():
                raise UserError(f"{entry.path} cannot be read (a broken link or no regular file): remove it.")
            else:
                stat = entry.stat()
                found.append(Item(name, size=stat.st_size, mtime=stat.st_mtime_ns))

    try:
        collect("", [])
    except OSError as error:
        raise UserError(f"{error.filename or root} cannot be read ({error.strerror}): repair or remove it.") from None
    return sorted(found, key=lambda image: natural_key(image.name))


def counts_of(left_out: LeftOut) -> str:
    """Return "2 .txt files, 1 hidden images"."""
    return ", ".join(f"{len(names)} {reason}" for reason, names in left_out.items()) or "nothing"


def group_of(pattern: str, name: str) -> str:
    """Return what a regular expression finds in a path: the first group that took part, or else the whole match."""
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise UserError(f"data.group={pattern!r} is not a regular expression ({error}).") from None
    if found is None:
        raise UserError(
            f"data.group={pattern!r} does not match {name}: write a regular expression that finds the group in every "
            "path, such as '([^/_]+)_[0-9]+', or the name of a column of a table."
        )
    return next((part for part in found.groups() if part is not None), found[0])


def fingerprint(value: Any) -> str:
    """Return a SHA-256 of JSON values in hex."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def local_root(root: str | Path | None, what: str) -> Path:
    """Return data.root as an absolute path, or raise UserError: `what` is missing."""
    if not root:
        raise UserError(f"data.root= is missing: give {what}.")
    return Path(root).expanduser().absolute()
