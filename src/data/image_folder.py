"""Images in folders, one folder per class."""

import os
from pathlib import Path
from typing import Any

from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import (
    SPLIT_OF,
    TRAIN,
    ImageList,
    Item,
    LeftOut,
    Tree,
    files_below,
    group_of,
    local_root,
    ordered_classes,
    splits_in,
)
from lockstep.runs.errors import UserError


class ImageFolderDataModule(ListedDataModule):
    """Folders root/<class>/, or root/train/<class>/ beside val/ (valid/, dev/, …) and test/, in any case.

    With target=mask they are images/ and masks/, with files of one name up to their endings.
    """

    target_choices = ("class", "number", "mask")

    def __init__(self, *, root: str | Path | None = None, name: str = "image_folder", **options: Any) -> None:
        super().__init__(name=name, **options)
        self._root = local_root(root, "a folder with one folder of images per class")

    def list_images(self) -> ImageList:
        root, left_out, tree, notes = self._root, LeftOut(), Tree(), []
        if not root.is_dir():
            fault = "is a file" if root.exists() else "does not exist"
            raise UserError(f"data.root={root} {fault}: give a folder with one folder of images per class.")
        every = files_below(root, left_out, tree)
        if not tree:
            raise UserError(f"{root} has no class folders: put the images into {root}/<class>/.")
        # A folder named train that holds images and no folders is a class: pictures of trains.
        splits = {name: SPLIT_OF[name.lower()] for name in tree if name.lower() in SPLIT_OF and tree[name]}
        if TRAIN not in splits.values() and len(splits) < len(tree):
            splits = {}
        if len(tree) > 1 and not any(tree.values()) and all(name.lower() in SPLIT_OF for name in tree):
            folders = ", ".join(sorted(tree))
            raise UserError(f"{root}: {folders} hold no class folders: make {root}/train/<class>/, or use data=csv.")
        if not splits and all(map(splits_in, tree)):  # as train_images/ beside test_images/
            splits = {name: splits_in(name)[0] for name, inner in tree.items() if inner}
        for name in tree.keys() - splits.keys() if splits else ():
            why = "it holds no class folders" if name.lower() in SPLIT_OF else f"splits are named {', '.join(SPLIT_OF)}"
            notes.append(f"{root / name} is left out: {why}.")
        images: dict[str, list[Item]] = {}  # by <class>, or by <split>/<class>
        for part in sorted(splits, key=lambda name: (splits[name], name)) or [""]:
            labels = ("images", "masks") if self.target == "mask" else ordered_classes(tree[part] if part else tree)
            images |= {f"{part}/{label}".lstrip("/"): [] for label in labels}
        for item in every:
            folder = "/".join(item.name.split("/", 2 if splits else 1)[:-1])
            if folder in images:
                part, _, item.label = folder.rpartition("/")
                item.split = splits.get(part, TRAIN)
                item.group = group_of(self.group, item.name) if self.group else None
                images[folder].append(item)
            else:
                left_out.setdefault("images outside of class folders", []).append(item.name)
        for folder, found in images.items():
            if not found and splits.get(folder.rpartition("/")[0], TRAIN) == TRAIN:
                other = {why: sum(name.startswith(f"{folder}/") for name in names) for why, names in left_out.items()}
                counts = ", ".join(f"{count} {why}" for why, count in other.items() if count) or "nothing"
                raise UserError(f"{root / folder} holds no images (left out: {counts}): add some or remove it.")
            inner = {item.name[len(folder) + 1 :].rpartition("/")[0].partition("/")[0] for item in found}
            if len(inner) > 1 and "" not in inner:
                some = ", ".join(sorted(inner)[:5])
                notes.append(f"{root / folder} counts as one class and holds only folders ({some}). Is that intended?")
        items = [item for found in images.values() for item in found]
        if self.target == "mask":
            mask_of = {os.path.splitext(item.name)[0]: item.name for item in items if item.label == "masks"}
            items = [item for item in items if item.label == "images"]
            for item in items:  # …/images/NAME.jpg has the mask …/masks/NAME.*
                name = os.path.splitext(item.name)[0].replace("images/", "masks/", 1)
                if name not in mask_of:
                    raise UserError(f"{root / item.name} has no mask {root / name}.png.")
                item.label = mask_of[name]
        return ImageList(root, items, left_out=left_out, notes=notes, target=self.target)
