"""List a folder of images with one folder per class, with or without folders for train, val and test."""

import os
from pathlib import Path
from typing import NamedTuple

from lockstep.data.decoding import SUFFIXES, is_image
from lockstep.data.listing import (
    SPLIT_OF,
    TRAIN,
    ImageList,
    LeftOut,
    group_of,
    make_list,
    natural_key,
    ordered_classes,
)
from lockstep.runs.errors import UserError

SYSTEM_NAMES = {  # of macOS, Synology, Linux, Windows, Python
    "__MACOSX", "@eaDir", "#recycle", "#snapshot", "lost+found", "$RECYCLE.BIN", "System Volume Information",
    "__pycache__",
}  # fmt: skip


class Found(NamedTuple):
    name: str  # relative to the root
    size: int  # bytes
    mtime: int  # nanoseconds


def list_folder(root: Path, group: str | None = None) -> ImageList:
    """List root/<class>/, or root/<split>/<class>/ where a folder is named train, valid, Test and so on.

    Args:
        group: a regular expression that finds the group of an image in its path.
    Raises:
        UserError: the folder is missing or has no class folders, or a class has no images.
    """
    if not root.is_dir():
        raise UserError(f"{root} does not exist: data.root must be a folder with one folder of images per class.")
    left_out: LeftOut = {}
    folders = _folders(root, "", left_out)
    if not folders:
        raise UserError(f"{root} has no class folders: put the images into {root}/<class>/.")
    # A folder named train that holds images and no folders is a class: pictures of trains.
    splits = {name: SPLIT_OF[name.lower()] for name in folders if name.lower() in SPLIT_OF and _folders(root, name, {})}
    if TRAIN not in splits.values() and len(splits) < len(folders):
        splits = {}
    notes, images, labels, split_of = [], [], [], []
    for name in set(folders) - splits.keys() if splits else ():
        left_out.setdefault("folders that are no split", []).append(name)
        why = "it holds no class folders" if name.lower() in SPLIT_OF else f"splits are named {', '.join(SPLIT_OF)}"
        notes.append(f"{root / name} is left out: {why}.")
    for part, split in sorted(splits.items(), key=lambda item: (item[1], item[0])) or [("", TRAIN)]:
        for label in ordered_classes(_folders(root, part, left_out) if part else folders):
            name = f"{part}/{label}" if part else label
            found = images_below(root, name, left_out)
            if not found and split == TRAIN:
                other = {why: sum(each.startswith(f"{name}/") for each in names) for why, names in left_out.items()}
                said = ", ".join(f"{count} {why}" for why, count in other.items() if count)
                hint = f"left out: {said}" if said else ", ".join(sorted(SUFFIXES))
                raise UserError(f"{root / name} holds no images ({hint}): add some or remove the folder.")
            inner = {image.name[len(name) + 1 :].rpartition("/")[0].partition("/")[0] for image in found}
            if len(inner) > 1 and "" not in inner:
                some = ", ".join(sorted(inner)[:5])
                notes.append(f"{root / name} counts as one class and holds only folders ({some}). Is data.root right?")
            images += found
            labels += [label] * len(found)
            split_of += [split] * len(found)
    names, sizes, mtimes = zip(*images) if images else ((), (), ())
    groups = [group_of(group, name) for name in names] if group else None
    return make_list(root, names, labels, split_of, sizes, mtimes, groups=groups, left_out=left_out, notes=notes)


def _folders(root: Path, part: str, left_out: LeftOut) -> list[str]:
    """The names of the folders in root/part; images beside them are left out."""
    found = []
    for entry in _entries(root, part, left_out):
        if entry.is_dir():
            found.append(entry.name)
        elif is_image(entry.name):
            left_out.setdefault("images outside of class folders", []).append(os.path.join(part, entry.name))
    return sorted(found)


def images_below(root: Path, name: str, left_out: LeftOut) -> list[Found]:
    """Return all images at any depth below root/name, in natural order of their names; no file is opened."""
    found: list[Found] = []

    def collect(name: str, above: set[tuple[int, int]]) -> None:
        for entry in _entries(root, name, left_out):
            inner = f"{name}/{entry.name}" if name else entry.name
            try:
                if entry.is_dir():
                    if (identity := _identity(entry.path)) in above:
                        left_out.setdefault("links to a folder above", []).append(inner)
                    else:
                        collect(inner, above | {identity})
                elif not is_image(entry.name):
                    ending = os.path.splitext(entry.name)[1].lower()
                    left_out.setdefault(f"{ending or 'nameless'} files", []).append(inner)
                elif not entry.is_file():
                    raise UserError(f"{entry.path} cannot be read (a broken link or no regular file): remove it.")
                else:
                    stat = entry.stat()
                    found.append(Found(inner, stat.st_size, stat.st_mtime_ns))
            except OSError as error:
                raise UserError(f"{entry.path} cannot be read ({error.strerror}): repair or remove it.") from None

    collect(name, {_identity(root), _identity(root / name)})
    return sorted(found, key=lambda image: natural_key(image.name))


def _entries(root: Path, name: str, left_out: LeftOut) -> list["os.DirEntry[str]"]:
    """All that is neither hidden nor the operating system's; hidden images are left out."""
    shown = []
    try:
        with os.scandir(root / name) as entries:
            for entry in entries:
                if not (entry.name.startswith(".") or entry.name in SYSTEM_NAMES):
                    shown.append(entry)
                elif is_image(entry.name):
                    left_out.setdefault("hidden images", []).append(os.path.join(name, entry.name))
    except OSError as error:
        raise UserError(f"{root / name} cannot be read ({error.strerror}).") from None
    return shown


def _identity(folder: str | Path) -> tuple[int, int]:
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino
