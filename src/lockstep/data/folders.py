"""List a folder of images with one folder per class, with or without folders for train, val and test."""

import os
from pathlib import Path
from typing import NamedTuple

from lockstep.data.decoding import SUFFIXES, is_image
from lockstep.data.listing import SPLIT_OF, TRAIN, ImageList, group_of, make_list, natural_key, ordered_classes
from lockstep.runs.errors import UserError

SYSTEM_NAMES = {  # of macOS, Synology, Linux, Windows, Python
    "__MACOSX", "@eaDir", "#recycle", "#snapshot", "lost+found", "$RECYCLE.BIN", "System Volume Information",
    "__pycache__",
}  # fmt: skip


class Image(NamedTuple):
    name: str
    size: int  # bytes
    mtime: int  # nanoseconds


class FolderScan:
    """The images below a folder, found by their endings: a million take seconds, as no file is opened.

    Args:
        root: what the names are relative to.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.left_out: dict[str, list[str]] = {}

    def leave_out(self, reason: str, name: str) -> None:
        self.left_out.setdefault(reason, []).append(name)

    def folders(self, folder: Path) -> list[str]:
        """Return the names of the folders in `folder`, and count the files beside them as left out."""
        found = []
        for entry in self._entries(folder):
            if entry.is_dir():
                found.append(entry.name)
            elif is_image(entry.name):
                self.leave_out("images outside of class folders", os.path.relpath(entry.path, self.root))
        return sorted(found)

    def images(self, name: str) -> list[Image]:
        """Return all images at any depth below root/name, in natural order of their names.

        Raises:
            UserError: a file or folder cannot be read.
        """
        found: list[Image] = []
        above = {_identity(self.root), _identity(self.root / name)}
        self._collect(name, above, found)
        return sorted(found, key=lambda image: natural_key(image.name))

    def _collect(self, name: str, above: set[tuple[int, int]], found: list[Image]) -> None:
        for entry in self._entries(self.root / name):
            inner = f"{name}/{entry.name}"
            try:
                if entry.is_dir():
                    if (identity := _identity(Path(entry.path))) in above:
                        self.leave_out("links to a folder above", inner)
                    else:
                        self._collect(inner, above | {identity}, found)
                elif not is_image(entry.name):
                    ending = os.path.splitext(entry.name)[1].lower()
                    self.leave_out(f"{ending} files" if ending else "files without an ending", inner)
                elif not entry.is_file():
                    raise UserError(f"{entry.path} cannot be read (a broken link or no regular file): remove it.")
                else:
                    stat = entry.stat()
                    found.append(Image(inner, stat.st_size, stat.st_mtime_ns))
            except OSError as error:
                raise UserError(f"{entry.path} cannot be read ({error.strerror}): repair or remove it.") from None

    def _entries(self, folder: Path) -> list["os.DirEntry[str]"]:
        """All that is neither hidden nor the operating system's."""
        try:
            with os.scandir(folder) as entries:
                every = list(entries)
        except OSError as error:
            raise UserError(f"{folder} cannot be read ({error.strerror}).") from None
        hidden = [entry for entry in every if entry.name.startswith(".") or entry.name in SYSTEM_NAMES]
        for entry in hidden:
            if is_image(entry.name):
                self.leave_out("hidden images", os.path.relpath(entry.path, self.root))
        return [entry for entry in every if not (entry.name.startswith(".") or entry.name in SYSTEM_NAMES)]


def _identity(folder: Path) -> tuple[int, int]:
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino


def list_folder(root: Path, group: str | None = None, *, key: str = "data.root") -> ImageList:
    """List root/<class>/, or root/<split>/<class>/ where a folder is named train, valid, Test and so on.

    Args:
        group: a regular expression that finds the group of an image in its path.
        key: the option that names the folder, for errors.
    Raises:
        UserError: the folder is missing or has no class folders, or a class has no images.
    """
    if not root.is_dir():
        raise UserError(f"{root} does not exist: {key} must be a folder with one folder of images per class.")
    scan, notes = FolderScan(root), []
    folders = scan.folders(root)
    if not folders:
        raise UserError(f"{root} has no class folders: put the images into {root}/<class>/.")
    # A folder named train that holds images and no folders is a class: pictures of trains.
    splits = {
        name: SPLIT_OF[name.lower()] for name in folders if name.lower() in SPLIT_OF and _holds_folders(root / name)
    }
    if TRAIN not in splits.values() and len(splits) < len(folders):
        splits = {}
    for name in set(folders) - splits.keys() if splits else ():
        scan.leave_out("folders that are no split", name)
        why = (
            "it holds no class folders" if name.lower() in SPLIT_OF else f"no split is named so ({', '.join(SPLIT_OF)})"
        )
        notes.append(f"{root / name} is left out: {why}.")
    images: list[Image] = []
    labels: list[str] = []
    split_of: list[int] = []
    for part, split in sorted(splits.items(), key=lambda item: (item[1], item[0])) or [("", TRAIN)]:
        depth = 2 if part else 1
        for label in ordered_classes(scan.folders(root / part) if part else folders):
            found = scan.images(f"{part}/{label}" if part else label)
            if not found and split == TRAIN:
                raise UserError(_empty(root / part / label, scan))
            inner = {name.split("/")[depth] if name.count("/") > depth else "" for name, *_ in found}
            if len(inner) > 1 and "" not in inner:
                notes.append(
                    f"{root / part / label} counts as one class and holds only folders "
                    f"({', '.join(sorted(inner)[:5])}). Is {key} right?"
                )
            images += found
            labels += [label] * len(found)
            split_of += [split] * len(found)
    names, sizes, mtimes = zip(*images) if images else ((), (), ())
    groups = [group_of(group, name) for name in names] if group else None
    return make_list(root, names, labels, split_of, sizes, mtimes, groups=groups, left_out=scan.left_out, notes=notes)


def _holds_folders(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return any(entry.is_dir() and not entry.name.startswith(".") for entry in entries)


def _empty(folder: Path, scan: FolderScan) -> str:
    inside = os.path.relpath(folder, scan.root) + "/"
    other = {reason: sum(name.startswith(inside) for name in names) for reason, names in scan.left_out.items()}
    said = ", ".join(f"{count} {reason}" for reason, count in other.items() if count)
    hint = f" (left out: {said})" if said else f" ({', '.join(sorted(SUFFIXES))})"
    return f"{folder} holds no images{hint}: add some or remove the folder."
