"""Images in folders, one folder per class."""

import os
from pathlib import Path
from typing import Any

from lockstep.data.decoding import SUFFIXES
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import (
    SPLIT_OF,
    TRAIN,
    ImageList,
    Item,
    LeftOut,
    Tree,
    group_of,
    images_below,
    local_root,
    ordered_classes,
    suggestion,
)
from lockstep.runs.errors import UserError


class ImageFolderDataModule(ListedDataModule):
    """Folders root/<class>/, or root/train/<class>/ beside val/ (valid/, dev/, …) and test/, in any case.

    Args:
        root: the folder.
        target: class; number: the names of the class folders; mask: root/images/ and root/masks/, or both in each
            split, with files of one name up to their endings.
        options: as of ListedDataModule.
    """

    target_choices = ("class", "number", "mask")

    def __init__(self, *, root: str | Path | None = None, name: str = "image_folder", **options: Any) -> None:
        super().__init__(name=name, **options)
        self._root = local_root(root, "image_folder", "FOLDER, with one folder of images per class")

    def list_images(self) -> ImageList:
        try:
            return list_folder(self._root, self.group, self.target)
        except UserError as error:
            raise UserError(f"{error}{suggestion(self._root, 'image_folder')}") from None


def list_folder(root: Path, group: str | None = None, target: str = "class") -> ImageList:
    """List root/<class>/, or root/<split>/<class>/ where a folder is named train, valid, Test and so on.

    Args:
        group: a regular expression that finds the group of an image in its path.
        target: class; number: what the folders are named; mask: the folders are images/ and masks/.
    Raises:
        UserError: the folder is missing or has no class folders, or a class has no images.
    """
    if not root.is_dir():
        raise UserError(f"{root} does not exist: data.root must be a folder with one folder of images per class.")
    left_out: LeftOut = {}
    tree: Tree = {}
    every = images_below(root, left_out, tree)
    if not tree:
        raise UserError(f"{root} has no class folders: put the images into {root}/<class>/.")
    # A folder named train that holds images and no folders is a class: pictures of trains.
    splits = {name: SPLIT_OF[name.lower()] for name in tree if name.lower() in SPLIT_OF and tree[name]}
    if TRAIN not in splits.values() and len(splits) < len(tree):
        splits = {}
    notes: list[str] = []
    items: list[Item] = []
    for name in tree.keys() - splits.keys() if splits else ():
        left_out.setdefault("folders that are no split", []).append(name)
        why = "it holds no class folders" if name.lower() in SPLIT_OF else f"splits are named {', '.join(SPLIT_OF)}"
        notes.append(f"{root / name} is left out: {why}.")
    depth = 2 if splits else 1
    of_folder: dict[str, list[Item]] = {}
    for image in every:
        parts = image.name.split("/")
        of_folder.setdefault("/".join(parts[:depth]) if len(parts) > depth else "", []).append(image)
    if outside := of_folder.pop("", []):
        left_out["images outside of class folders"] = [image.name for image in outside]
    for part, split in sorted(splits.items(), key=lambda item: (item[1], item[0])) or [("", TRAIN)]:
        for label in ordered_classes(tree[part] if part else tree):
            name = f"{part}/{label}" if part else label
            if target == "mask" and label not in ("images", "masks"):
                left_out.setdefault("folders beside images/ and masks/", []).append(name)
                continue
            found = of_folder.get(name, [])
            if not found and split == TRAIN:
                other = {why: sum(each.startswith(f"{name}/") for each in names) for why, names in left_out.items()}
                counts = ", ".join(f"{count} {why}" for why, count in other.items() if count)
                hint = f"left out: {counts}" if counts else ", ".join(sorted(SUFFIXES))
                raise UserError(f"{root / name} holds no images ({hint}): add some or remove the folder.")
            inner = {image.name[len(name) + 1 :].rpartition("/")[0].partition("/")[0] for image in found}
            if len(inner) > 1 and "" not in inner:
                some = ", ".join(sorted(inner)[:5])
                notes.append(f"{root / name} counts as one class and holds only folders ({some}). Is data.root right?")
            for item in found:
                item.label, item.split, item.group = label, split, group_of(group, item.name) if group else None
            items += found
    if target == "mask":
        mask_of = {os.path.splitext(item.name)[0]: item.name for item in items if item.label == "masks"}
        items = [item for item in items if item.label == "images"]
        for item in items:  # …/images/NAME.jpg has the mask …/masks/NAME.*
            folder, _, name = os.path.splitext(item.name)[0].rpartition("images/")
            if f"{folder}masks/{name}" not in mask_of:
                raise UserError(f"{root / item.name} has no mask {root / folder / 'masks' / name}.png.")
            item.label = mask_of[f"{folder}masks/{name}"]
    return ImageList(root, items, left_out=left_out, notes=notes, target=target)
