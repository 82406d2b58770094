"""A list of labelled images in files, tables or shards, made before any image is opened.

Every source uses the same names of splits and the same order of classes.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import SUFFIXES, CorruptImage, open_mask
from lockstep.process.errors import UserError

TRAIN, VAL, TEST = 0, 1, 2
SPLITS = ("train", "val", "test")
SPLIT_OF = {  # the names that Hugging Face's datasets accept, in any case
    "train": TRAIN,
    "training": TRAIN,
    "trainval": TRAIN,
    "val": VAL,
    "valid": VAL,
    "validation": VAL,
    "dev": VAL,
    "test": TEST,
    "testing": TEST,
    "eval": TEST,
    "evaluation": TEST,
    "publictest": VAL,  # Kaggle's
    "privatetest": TEST,
}
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")
SYSTEM_NAMES = {
    "__MACOSX",
    "@eaDir",  # Synology
    "#recycle",
    "#snapshot",
    "lost+found",
    "$RECYCLE.BIN",
    "System Volume Information",
    "__pycache__",
}
LeftOut = dict[str, list[str]]
"""Names of what is skipped, by reason: `{"hidden images": ["cat/._1.jpg"]}`."""


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
    start: int = 0  # its first byte in that file
    line: int = 0  # its line in a table; 0: it is in none


class ImageList:
    """A list of n images: first those to train on, then those to validate on, then those to test on.

    Attributes:
        targets: (n,) int64 classes, (n,) float32 numbers or (n, C) float32 labels; zeros where
            there are masks, nan where a label is unknown.
        class_names: in the order of the classes or labels.
        splits: (n,) int8, ascending: 0 train, 1 val, 2 test.
        groups: (n,) int64, images that stay in one split together; None: each image is alone.

    Args:
        folder: what names and files are relative to.
        target: what labels are: class, number, or mask, a path relative to `folder`.
        label_columns: with several labels, their names.
        unknown: the number of several labels that means "not known"; None: there is none.
        left_out: for the log.
        warnings: sentences for the log.
    """

    def __init__(
        self,
        folder: Path,
        items: Sequence[Item],
        *,
        target: str = "class",
        label_columns: Sequence[str] = (),
        unknown: float | None = None,
        left_out: LeftOut | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.left_out = left_out or {}
        self.warnings = list(warnings)
        if not items:
            raise UserError(f"{folder} has no images (left out: {counts_of(self.left_out)}).")
        items = sorted(items, key=lambda item: item.split)

        self._store(items)
        self.has_masks = target == "mask"
        self.class_names = list(label_columns)
        labels = [item.label for item in items]
        self._masks = _as_bytes(labels if self.has_masks else [])
        if self.has_masks:
            self.targets = np.zeros(len(items), np.int64)
        elif label_columns or target == "number":
            self.targets = _numbers(folder, items, len(label_columns))
        else:
            self.targets = self._classes_of(labels)
            self.warnings += alike_names(self.class_names)
        if unknown is not None and label_columns:
            self.targets[self.targets == unknown] = np.nan

    def _store(self, items: Sequence[Item]) -> None:
        """Keep what the items have, in arrays that worker processes share.

        They would copy strings one by one.
        """
        self._names = _as_bytes([item.name for item in items])
        self.splits = np.array([item.split for item in items], np.int8)
        self.size = np.array([item.size for item in items], np.int64)
        self.lines = np.array([item.line for item in items], np.int64)
        self._mtime = np.array([item.mtime for item in items], np.int64)
        self._start = np.array([item.start for item in items], np.int64)
        self._files = _numbered([item.file for item in items])
        groups = _numbered([item.group for item in items])
        self.groups = groups[1] if groups else None

    def _classes_of(self, labels: Sequence[str]) -> np.ndarray:
        """Return (n,) int64 classes, and set their names."""
        tidy = tidy_labels(set(labels))
        self.class_names = ordered_classes(tidy.values())
        number_of = {name: number for number, name in enumerate(self.class_names)}
        return np.array([number_of[tidy[label]] for label in labels], np.int64)

    def __len__(self) -> int:
        return len(self.splits)

    def name(self, i: int) -> str:
        return os.fsdecode(self._names[i])

    def path(self, i: int) -> str:
        """Return the image's name with the folder before it."""
        return str(self.folder / self.name(i))

    def mask_path(self, i: int) -> Path:
        return self.folder / os.fsdecode(self._masks[i])

    def read(self, i: int, first: int = 0, count: int | None = None) -> bytes:
        """Return the encoded image, or `count` of its bytes from `first` on.

        Raises:
            CorruptImage: it cannot be read, or the file has become shorter.
        """
        file = self._files[0][self._files[1][i]] if self._files else self.path(i)
        count = int(self.size[i]) if count is None else count
        try:
            with open(file, "rb") as opened:
                opened.seek(int(self._start[i]) + first)
                data = opened.read(count)
        except OSError as error:
            raise CorruptImage(f"{self.path(i)} cannot be read ({error.strerror})") from None
        if len(data) < count:
            raise CorruptImage(f"{self.path(i)} is shorter than when it was listed")
        return data

    def read_mask(self, i: int) -> np.ndarray:
        """Return the grey level of each pixel, (height, width) uint8."""
        return open_mask(self.mask_path(i))

    @property
    def identity(self) -> str:
        """A hash that changes with any name, size, time, target or split."""
        masks = []
        for i in range(len(self._masks)):
            stat = os.stat(self.mask_path(i))
            masks.append((os.fsdecode(self._masks[i]), stat.st_size, stat.st_mtime_ns))
        arrays = [array.tolist() for array in (self._mtime, self.targets, self.splits)]
        return fingerprint([self.content_hash(), str(self.folder), self.class_names, masks, arrays])

    def content_hash(self) -> str:
        """Return a hash of names and sizes, for images that nobody has opened."""
        return fingerprint([[os.fsdecode(name) for name in self._names], self.size.tolist()])


def _as_bytes(names: Sequence[str]) -> np.ndarray:
    return np.array([os.fsencode(name) for name in names], np.bytes_)


def _numbered(values: list[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the distinct values and the number of each value; None where a value is missing."""
    if None in values:
        return None
    distinct, numbers = np.unique(values, return_inverse=True)
    return distinct, numbers


def _numbers(folder: Path, items: Sequence[Item], columns: int) -> np.ndarray:
    """Return (n,) float32, or (n, columns) where an item has several labels."""
    shape = (columns,) if columns else ()
    return np.array([_number(folder, item, shape) for item in items], np.float32)


def _number(folder: Path, item: Item, shape: tuple[int, ...]) -> np.ndarray:
    try:
        number = np.asarray(item.label, np.float32)
    except (TypeError, ValueError):
        number = np.array([])
    if number.shape != shape or not np.isfinite(number).all():
        line = f" (line {item.line})" if item.line else ""
        label = str(item.label)[:50]
        raise UserError(f"{folder / item.name}: the target {label} is not a number{line}.")
    return number


def tidy_labels(labels: Iterable[str]) -> dict[str, str]:
    r"""Return the class name for each spelling of a label.

    A class name is one line without blanks around it. "1.0" is "1", and bytes that are not UTF-8
    are written as "\xff".
    """
    tidy = {label: os.fsencode(label).decode("utf-8", "backslashreplace") for label in labels}
    tidy = {label: re.sub(r"[\x00-\x1f\x7f]", " ", name).strip() for label, name in tidy.items()}
    if all(WHOLE_NUMBER.fullmatch(name) for name in tidy.values()):
        return {label: name.partition(".")[0] for label, name in tidy.items()}
    return {label: unicodedata.normalize("NFC", name) for label, name in tidy.items()}


def alike_names(class_names: Iterable[str]) -> list[str]:
    """Return a sentence for each two class names that differ in case or blanks alone."""
    first_of: dict[str, str] = {}
    sentences = []
    for name in class_names:
        earlier = first_of.setdefault("".join(name.casefold().split()), name)
        if earlier != name:
            sentences.append(
                f"The classes {earlier} and {name} differ in case or blanks alone and count as "
                f"two. If they are one class, write {earlier} and {name} alike in the data."
            )
    return sentences


def splits_in(name: str) -> list[int]:
    """Return the splits that words of a name say, as of train_images, testset or val-0."""
    words = re.split("[^a-z]+", name.lower())
    stems = [re.sub("(set|data|split)$", "", word) for word in words]
    return [SPLIT_OF[stem] for stem in stems if stem in SPLIT_OF]


def ordered_classes(names: Iterable[str]) -> list[str]:
    """Sort class names: whole numbers as numbers, others as torchvision's ImageFolder does."""
    distinct = sorted(set(names))
    if all(WHOLE_NUMBER.fullmatch(name) for name in distinct):
        return sorted(distinct, key=float)
    return distinct


def natural_key(name: str) -> list[str | int]:
    """Sort img9 before img10."""
    parts: list[str | int] = list(re.split("([0-9]+)", name))  # text and digits in turn
    parts[1::2] = map(int, parts[1::2])
    return parts


def files_below(
    root: Path,
    left_out: LeftOut,
    folders: list[str] | None = None,
    suffixes: Collection[str] = SUFFIXES,
) -> list[Item]:
    """Return all images (or files with other endings) at any depth below root, in natural order.

    Args:
        left_out: gets the names of other files, and of hidden images.
        folders: gets the paths of all folders.
    """
    items: list[Item] = []
    to_read: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    try:
        while to_read:
            folder, above = to_read.pop()
            stat = os.stat(root / folder)
            inode = (stat.st_dev, stat.st_ino)
            if inode in above:
                left_out.setdefault("links to a folder above", []).append(folder)
                continue
            if folders is not None and folder:
                folders.append(folder)
            inner = _read_folder(root, folder, suffixes, items, left_out)
            to_read += [(name, above | {inode}) for name in inner]
    except OSError as error:
        raise UserError(
            f"{error.filename or root} cannot be read ({error.strerror}): repair or remove it."
        ) from None
    return sorted(items, key=lambda image: natural_key(image.name))


def _read_folder(
    root: Path, folder: str, suffixes: Collection[str], items: list[Item], left_out: LeftOut
) -> list[str]:
    """Add the files of one folder to `items` or `left_out`, and return the folders in it."""
    inner = []
    for entry in list(os.scandir(root / folder)):
        name = f"{folder}/{entry.name}".lstrip("/")
        suffix = os.path.splitext(entry.name.lstrip("."))[1].lower()
        if entry.name.startswith(".") or entry.name in SYSTEM_NAMES:
            if suffix in suffixes:
                left_out.setdefault("hidden images", []).append(name)
        elif entry.is_dir():
            inner.append(name)
        elif suffix not in suffixes:
            left_out.setdefault(f"{suffix or 'nameless'} files", []).append(name)
        elif not entry.is_file():
            raise UserError(
                f"{entry.path} cannot be read (a broken link or no regular file): remove it."
            )
        else:
            stat = entry.stat()
            items.append(Item(name, size=stat.st_size, mtime=stat.st_mtime_ns))
    return inner


def counts_of(left_out: LeftOut) -> str:
    """Return "2 .txt files, 1 hidden images"."""
    counts = [f"{len(names)} {reason}" for reason, names in left_out.items()]
    return ", ".join(counts) or "nothing"


def group_of(pattern: str, name: str) -> str:
    """Return what a regular expression matches in a path.

    It is the first group that took part, or else the whole match.
    """
    try:
        match = re.search(pattern, name)
    except re.error as error:
        raise UserError(f"data.group={pattern!r} is not a regular expression ({error}).") from None
    if match is None:
        raise UserError(
            f"data.group={pattern!r} does not match {name}: write a regular expression that finds "
            "the group in every path, such as '([^/_]+)_[0-9]+', or the name of a column of a "
            "table."
        )
    return next((part for part in match.groups() if part is not None), match[0])


def fingerprint(value: Any) -> str:
    """Return a SHA-256 of JSON values in hex."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def local_root(root: str | Path | None, what: str) -> Path:
    """Return data.root as an absolute path, or raise UserError: `what` is missing."""
    if not root:
        raise UserError(f"data.root= is missing: give {what}.")
    return Path(root).expanduser().absolute()
