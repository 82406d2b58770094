"""List images: names of splits, the order of classes, the files in folders, their groups."""

import hashlib
import json
import logging
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from lockstep.data.decoding import ARRAY_SUFFIX, SUFFIXES
from lockstep.process.errors import UserError

log = logging.getLogger(__name__)

TRAIN = 0
VAL = 1
TEST = 2
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
    """One image of a source.

    Attributes:
        name: the path of its file relative to the source's folder, or its name in messages.
        label: the name of its class, a number, the path of its mask, or several numbers.
        num_bytes: the size of the encoded image.
        mtime: the time of the file's last change, in nanoseconds.
        group: images of one group stay in one split.
        shard: the file of several images that holds it; None: it has a file of its own.
        offset: its first byte in the shard.
        line: its line in a table; 0: it is in none.
        column_values: its values in further columns of a table.
    """

    name: str
    label: Any = ""
    split: int = TRAIN
    num_bytes: int = 0
    mtime: int = 0
    group: str | None = None
    shard: str | None = None
    offset: int = 0
    line: int = 0
    column_values: Mapping[str, Any] = field(default_factory=dict)


def tidy_labels(labels: Iterable[str]) -> dict[str, str]:
    r"""Return the class name for each spelling of a label.

    A class name is one line without blanks around it. If all labels are whole numbers, "1.0" is
    "1". Bytes that are not UTF-8 are written as "\xff".
    """
    tidy = {label: os.fsencode(label).decode("utf-8", "backslashreplace") for label in labels}
    tidy = {label: re.sub(r"[\x00-\x1f\x7f]", " ", name).strip() for label, name in tidy.items()}
    if all(WHOLE_NUMBER.fullmatch(name) for name in tidy.values()):
        return {label: name.partition(".")[0] for label, name in tidy.items()}
    return {label: unicodedata.normalize("NFC", name) for label, name in tidy.items()}


def describe_merged_labels(tidy: Mapping[str, str]) -> list[str]:
    """Return a sentence for each pair of labels that are one class, such as "cat" and "cat ".

    Args:
        tidy: what `tidy_labels` returns.
    """
    first_of: dict[str, str] = {}
    sentences = []
    for label in sorted(tidy):
        earlier = first_of.setdefault(tidy[label], label)
        if earlier != label and earlier.strip() == label.strip():
            sentences.append(
                f"The labels {earlier!r} and {label!r} differ in blanks alone and count as one "
                "class. If they are two classes, give them other names."
            )
    return sentences


def describe_alike_names(class_names: Iterable[str]) -> list[str]:
    """Return a sentence for each pair of class names that look alike, such as Cat and cat."""
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


def parse_splits(name: str) -> list[int]:
    """Return the splits that the words of a name stand for, as [TRAIN] for train_images."""
    stems = [re.sub("(set|data|split)$", "", word) for word in re.split("[^a-z]+", name.lower())]
    return [SPLIT_OF[stem] for stem in stems if stem in SPLIT_OF]


def sort_classes(names: Iterable[str]) -> list[str]:
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


def list_files(
    root: Path,
    left_out: LeftOut,
    folders: list[str] | None = None,
    suffixes: Collection[str] = SUFFIXES,
) -> list[Item]:
    """Return all images at any depth below root, in natural order.

    Args:
        left_out: gets the names of other files, and of hidden images.
        folders: gets the paths of all folders.
        suffixes: the endings of the files to list.
    """
    items: list[Item] = []
    pending: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    try:
        while pending:
            folder, above = pending.pop()
            stat = os.stat(root / folder)
            inode = (stat.st_dev, stat.st_ino)
            if inode in above:
                left_out.setdefault("links to a folder above", []).append(folder)
                continue
            if folders is not None and folder:
                folders.append(folder)
            inner = _read_folder(root, folder, suffixes, items, left_out)
            pending += [(name, above | {inode}) for name in inner]
    except OSError as error:
        raise UserError(
            f"{error.filename or root} cannot be read ({error.strerror}): repair or remove it."
        ) from None
    items = without_arrays(items, left_out, "files")
    # 1.png and 01.png have one natural key. Without the name their order would be that of the disk.
    return sorted(items, key=lambda image: (natural_key(image.name), image.name))


def without_arrays(files: list[Any], left_out: LeftOut, kind: str) -> list[Any]:
    """Return the pictures without NumPy files beside them, which may be their features.

    If there are only NumPy files, these are the images.

    Args:
        files: objects that have a `name`.
        left_out: gets the names of the NumPy files.
        kind: the word for them in `left_out`: files or members.
    """
    arrays: list[Any] = []
    pictures: list[Any] = []
    for file in files:
        if file.name.lower().endswith(ARRAY_SUFFIX):
            arrays.append(file)
        else:
            pictures.append(file)
    if not arrays or not pictures:
        return files
    left_out.setdefault(f"{ARRAY_SUFFIX} {kind}", []).extend(file.name for file in arrays)
    return pictures


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
            items.append(Item(name, num_bytes=stat.st_size, mtime=stat.st_mtime_ns))
    return inner


def describe_counts(left_out: LeftOut) -> str:
    """Return "2 .txt files, 1 hidden images"."""
    counts = [f"{len(names)} {reason}" for reason, names in left_out.items()]
    return ", ".join(counts) or "nothing"


def match_group(pattern: str, name: str) -> str:
    """Return the group of an image, the part of its path that a regular expression matches.

    "([^/_]+)_[0-9]+" returns p7 for cats/p7_12.png. "p[0-9]+", without brackets, returns it too.
    With several brackets the first one that matches counts.
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


def hash_json(value: Any) -> str:
    """Return the SHA-256 of JSON values in hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def resolve_root(root: str | Path | None, description: str) -> Path:
    """Return data.root as an absolute path.

    Raises:
        UserError: there is no root; it says to give `description`.
    """
    if not root:
        raise UserError(f"data.root= is missing: give {description}.")
    return Path(root).expanduser().absolute()


@rank_zero_only
def warn_of_class_order(name: str, class_names: Sequence[str]) -> None:
    """Warn if a kept head of ImageNet may have its classes in another order than the data.

    timm's weights have the order of the folder names of ImageNet, n01440764, n01443537, ….
    Numbers that rise are taken for timm's own.
    """
    if all(re.fullmatch(r"n\d{8}", class_name) for class_name in class_names):
        return
    if list(class_names) == [str(number) for number in range(len(class_names))]:
        return
    first_names = ", ".join(class_names[:3])
    log.warning(
        f"{name} brings its own {len(class_names)} outputs, and they are taken for this data's "
        f"classes in their order ({first_names}, …). If theirs is another, rename the folders or "
        "labels so that sorting gives it."
    )
