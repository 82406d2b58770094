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
    counts_of,
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
        root, left_out, folders = self._root, LeftOut(), list[str]()
        if not root.is_dir():
            fault = "is a file" if root.exists() else "does not exist"
            raise UserError(f"data.root={root} {fault}: give a folder with one folder of images per class.")
        every = files_below(root, left_out, folders)
        tree: dict[str, list[str]] = {name: [] for name in folders if "/" not in name}
        for name in folders:
            if name.count("/") == 1:
                tree[name.partition("/")[0]].append(name.partition("/")[2])
        if not tree:
            raise UserError(f"{root} has no class folders: put the images into {root}/<class>/.")
        splits = self._splits_of(tree)
        images: dict[str, list[Item]] = {}  # by <class>, or by <split>/<class>
        for part in sorted(splits, key=lambda name: (splits[name], name)) or [""]:
            labels = ("images", "masks") if self.target == "mask" else ordered_classes(tree[part] if part else tree)
            images |= {f"{part}/{label}".lstrip("/"): [] for label in labels}
        for item in every:
            folder = "/".join(item.name.split("/", 2 if splits else 1)[:-1])
            if folder not in images:
                top = f"{item.name.partition('/')[0]}/, which is no split of class folders"
                why = f"images in {top}" if splits and "/" in item.name else "images outside of class folders"
                left_out.setdefault(why, []).append(item.name)
                continue
            part, _, item.label = folder.rpartition("/")
            item.split = splits.get(part, TRAIN)
            item.group = group_of(self.group, item.name) if self.group else None
            images[folder].append(item)
        for folder, found in images.items():
            if not found and splits.get(folder.rpartition("/")[0], TRAIN) == TRAIN:
                others = {
                    why: [name for name in names if name.startswith(f"{folder}/")] for why, names in left_out.items()
                }
                counts = counts_of({why: names for why, names in others.items() if names})
                raise UserError(f"{root / folder} holds no images (left out: {counts}): add some or remove it.")
        items = [item for found in images.values() for item in found]
        if self.target == "mask":  # …/images/NAME.jpg has the mask …/masks/NAME.*
            mask_of = {os.path.splitext(item.name)[0]: item.name for item in items if item.label == "masks"}
            items = [item for item in items if item.label == "images"]
            for item in items:
                name = os.path.splitext(item.name)[0].replace("images/", "masks/", 1)
                if name not in mask_of:
                    raise UserError(f"{root / item.name} has no mask {root / name}.png.")
                item.label = mask_of[name]
        return ImageList(root, items, left_out=left_out, target=self.target)

    def _splits_of(self, tree: dict[str, list[str]]) -> dict[str, int]:
        """Return the folders that are splits; {} where all are classes.

        Args:
            tree: the folders in `root`, with the folders within each.
        """
        # A folder named train that holds images and no folders is a class: pictures of trains.
        splits = {name: SPLIT_OF[name.lower()] for name, inner in tree.items() if inner and name.lower() in SPLIT_OF}
        if TRAIN in splits.values() or len(splits) == len(tree):
            like = {name: splits_in(name) for name, inner in tree.items() if inner and name not in splits}
            return splits | {
                name: parts[0] for name, parts in like.items() if parts and parts[0] not in splits.values()
            }
        for name, inner in tree.items() if len(tree) == 1 else ():
            if TRAIN in (SPLIT_OF.get(each.lower()) for each in inner):
                raise UserError(
                    f"{self._root} holds only {name}/ with {', '.join(sorted(inner))}: add /{name} to data.root."
                )
        if all(map(splits_in, tree)):  # as train_images/ beside test_images/
            if len(tree) > 1 and not any(tree.values()):
                if TRAIN not in {splits_in(name)[0] for name in tree}:  # classes, as test_tube/ and dev_board/
                    return {}
                folders = ", ".join(sorted(tree))
                raise UserError(
                    f"{self._root}: {folders} hold no class folders: make train/<class>/ there, or use data=csv."
                )
            return {name: splits_in(name)[0] for name, inner in tree.items() if inner}
        within = {name.lower() for found in tree.values() for name in found}
        if within and all(tree.values()) and within <= SPLIT_OF.keys():
            one, other = sorted(tree)[0], sorted(within)[0]
            raise UserError(
                f"{self._root}: the splits lie within {', '.join(sorted(tree))}: move {one}/{other} to {other}/{one} "
                "and so on."
            )
        for name in splits:
            if all(set(tree[name]) & set(found) for found in tree.values()):
                raise UserError(f"{self._root}: {name}/ is a split and no folder beside it is named train: rename one.")
        return {}
