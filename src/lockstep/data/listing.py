"""A list of labelled images in files, tables or shards, made before any image is opened.

Every source uses the same rules for names of splits, for class names and for their order.
"""

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import CorruptImage, is_image
from lockstep.runs.errors import UserError

TRAIN, VAL, TEST = 0, 1, 2
SPLITS = ("train", "val", "test")
SPLIT_OF = {  # the names that Hugging Face's datasets know, in any case
    "train": TRAIN, "training": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "dev": VAL,
    "test": TEST, "testing": TEST, "eval": TEST, "evaluation": TEST,
}  # fmt: skip
GROUPS = {".csv": "csv", ".parquet": "parquet", ".tar": "webdataset"}  # the option of data= for each kind of file
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")
DIGITS = re.compile("([0-9]+)")


class Names:
    """Many strings in one array of bytes, so that worker processes share them and never copy them.

    Args:
        strings: in order.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [os.fsencode(string) for string in strings]
        self.ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
        self.text = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> str:
        first = int(self.ends[i - 1]) if i else 0
        return os.fsdecode(self.text[first : int(self.ends[i])].tobytes())


@dataclass(frozen=True)
class ImageList:
    """n images, first those to train on, then those to validate on, then those to test on.

    Args:
        folder: what `files` are relative to.
        names: what messages call each image; relative to `folder`, so that a copy of the data has the same.
        files: the paths that hold images.
        file: (n,) int64, the position in `files`.
        start: (n,) int64, the first byte in that file.
        size: (n,) int64, bytes.
        mtime: (n,) int64, when the file was changed, in nanoseconds.
        class_names: all classes, in the order of their labels.
        labels: (n,) int64.
        splits: (n,) int8, ascending: 0 train, 1 val, 2 test. A source without splits has only train.
        groups: (n,) int64; images of one group stay in one split. None: every image is its own group.
        left_out: names of what was not taken, by reason; "3 hidden images" is `len` and key.
        notes: sentences about the data that the log shows.
    """

    folder: Path
    names: Names
    files: Names
    file: np.ndarray
    start: np.ndarray
    size: np.ndarray
    mtime: np.ndarray
    class_names: list[str]
    labels: np.ndarray
    splits: np.ndarray
    groups: np.ndarray | None = None
    left_out: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> bytes:
        """Return the encoded image.

        Raises:
            CorruptImage: it cannot be read, or the file has become shorter.
        """
        size = int(self.size[i])
        try:
            with open(self.folder / self.files[int(self.file[i])], "rb") as file:
                file.seek(int(self.start[i]))
                data = file.read(size)
        except OSError as error:
            raise CorruptImage(f"{self.path(i)} cannot be read ({error.strerror})") from None
        if len(data) < size:
            raise CorruptImage(f"{self.path(i)} is shorter than when it was listed")
        return data

    def path(self, i: int) -> str:
        """The image's name with the folder before it."""
        return str(self.folder / self.names[i])

    @property
    def identity(self) -> str:
        """A hash that changes with any name, size, time, label or split."""
        digest = hashlib.sha256(json.dumps([str(self.folder), self.class_names]).encode())
        for array in (self.names.text, self.names.ends, self.size, self.mtime, self.labels, self.splits):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def content_hash(self, kept: Iterable[int]) -> str:
        """Return a hash of names and sizes, for images that nobody has opened."""
        kept = list(kept)
        return fingerprint([[self.names[i] for i in kept], self.size[kept].tolist()])


def make_list(
    folder: Path,
    names: Sequence[str],
    labels: Sequence[str],
    splits: Sequence[int] | np.ndarray,
    size: Sequence[int] | np.ndarray,
    mtime: Sequence[int] | np.ndarray,
    *,
    files: Sequence[str] | None = None,
    file: np.ndarray | None = None,
    start: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
    left_out: dict[str, list[str]] | None = None,
    notes: list[str] | None = None,
) -> ImageList:
    """Return the list of n images, ordered by split; within a split the order given stays.

    Args:
        labels: the class of each image.
        splits: 0 train, 1 val, 2 test.
        files, file, start: as of ImageList; None: each image is the file of its name.
        groups: the group of each image.
    Raises:
        UserError: there is no image.
    """
    if not len(names):
        found = "; ".join(f"{len(each)} {reason}" for reason, each in (left_out or {}).items())
        raise UserError(f"{folder} has no images{f' (left out: {found})' if found else ''}.")
    order = np.argsort(np.asarray(splits, np.int8), kind="stable")
    tidy = tidy_labels(set(labels))
    class_names = ordered_classes(tidy.values())
    number_of = {name: number for number, name in enumerate(class_names)}
    packed = Names([names[i] for i in order])
    n = len(order)
    return ImageList(
        folder=folder,
        names=packed,
        files=packed if files is None else Names(files),
        file=np.arange(n) if file is None else file[order],
        start=np.zeros(n, np.int64) if start is None else start[order],
        size=np.asarray(size, np.int64)[order],
        mtime=np.asarray(mtime, np.int64)[order],
        class_names=class_names,
        labels=np.array([number_of[tidy[labels[i]]] for i in order], np.int64),
        splits=np.asarray(splits, np.int8)[order],
        groups=None if groups is None else np.unique([groups[i] for i in order], return_inverse=True)[1],
        left_out=left_out or {},
        notes=notes or [],
    )


def tidy_labels(labels: Iterable[str]) -> dict[str, str]:
    """Return the class name for each spelling: without blanks around it, printable, and "1" for "1.0"."""
    tidy = {label: printable(label).strip() for label in labels}
    if all(WHOLE_NUMBER.fullmatch(name) for name in tidy.values()):
        return {label: name.partition(".")[0] for label, name in tidy.items()}
    return tidy


def printable(text: str) -> str:
    r"""Return the text in composed Unicode; bytes that are no UTF-8 become "\xff"."""
    return unicodedata.normalize("NFC", os.fsencode(text).decode("utf-8", "backslashreplace"))


def ordered_classes(names: Iterable[str]) -> list[str]:
    """Sort class names: whole numbers as numbers, anything else as torchvision's ImageFolder does."""
    distinct = set(names)
    if all(WHOLE_NUMBER.fullmatch(name) for name in distinct):
        return sorted(distinct, key=lambda name: (int(name), name))
    return sorted(distinct)


def natural_key(name: str) -> list[str | int]:
    """Sort img9 before img10."""
    parts: list[str | int] = list(DIGITS.split(name))  # text and digits in turn
    parts[1::2] = map(int, parts[1::2])
    return parts


def group_of(pattern: str, name: str) -> str:
    """Return the part of a path that a regular expression matches: its first group, or else the whole match.

    Raises:
        UserError: the pattern is invalid, or does not match.
    """
    try:
        found = re.search(pattern, name)
    except re.error as error:
        raise UserError(f"data.group={pattern!r} is not a regular expression ({error}).") from None
    if found is None:
        raise UserError(
            f"data.group={pattern!r} does not match {name}: write a regular expression that finds the group in every "
            "path, such as '([^/_]+)_[0-9]+', or the name of a column of a table."
        )
    return found[1] if found.re.groups else found[0]


def fingerprint(value: Any) -> str:
    """Return a SHA-256 of JSON values in hex."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def local_root(root: str | Path | None, group: str, example: str) -> Path:
    """Return data.root as an absolute path.

    Raises:
        UserError: it is not given, or is a remote address.
    """
    if not root:
        raise UserError(f"data={group} needs data.root={example}.")
    if "://" in str(root):
        raise UserError(
            f"data.root={root} is an address, and images are read from a disk: copy them first, as train.py and "
            "eval.py do for s3://bucket/prefix."
        )
    return Path(root).expanduser().absolute()


def suggestion(root: Path, mine: str) -> str:
    """Return the end of an error message of data=`mine`: the option that reads what is in `root`, if another does."""
    inner = [*_some_of(root), *_some_of(root / "train")]
    for path in (root, *inner, *_some_of(root / "data")):
        group = GROUPS.get(path.suffix.lower(), mine)
        if group != mine and path.is_file():
            return f" Did you mean data={group} data.root={path if group == 'csv' else root}?"
    if mine != "image_folder" and any(is_image(path.name) for each in inner for path in _some_of(each)):
        return f" Did you mean data=image_folder data.root={root}?"
    return ""


def _some_of(folder: Path, limit: int = 1000) -> list[Path]:
    """The first entries of a folder, which may hold millions."""
    try:
        with os.scandir(folder) as entries:
            return sorted(Path(entry.path) for entry, _ in zip(entries, range(limit)))
    except OSError:
        return []
