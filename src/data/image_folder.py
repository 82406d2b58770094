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
    group_of,
    images_below,
    local_root,
    ordered_classes,
)
from lockstep.runs.errors import UserError


class ImageFolderDataModule(ListedDataModule):
    """Folders root/<class>/, or root/train/<class>/ beside val/ (valid/, dev/, …) and test/, in any case.

    Args:
        root: the folder.
        target: class; number: the names of the class folders; mask: root/images/ and root/masks/, or both in each
            split, with files of one name up to their endings.
        options: as of ListedDataModule; `group` is a regular expression over the path.
    """

    target_choices = ("class", "number", "mask")

    def __init__(self, *, root: str | Path | None = None, name: str = "image_folder", **options: Any) -> None:
        super().__init__(name=name, **options)
        self._root = local_root(root, "a folder with one folder of images per class")

    def list_images(self) -> ImageList:
        root = self._root
        if not root.is_dir():
            raise UserError(f"data.root={root} does not exist: give a folder with one folder of images per class.")
        left_out: LeftOut = {}
        tree: Tree = {}
        every, notes = images_below(root, left_out, tree), []
        if not tree:
            raise UserError(f"{root} has no class folders: put the images into {root}/<class>/.")
        # A folder named train that holds images and no folders is a class: pictures of trains.
        splits = {name: SPLIT_OF[name.lower()] for name in tree if name.lower() in SPLIT_OF and tree[name]}
        if TRAIN not in splits.values() and len(splits) < len(tree):
            splits = {}
        for name in tree.keys() - splits.keys() if splits else ():
            why = "it holds no class folders" if name.lower() in SPLIT_OF else f"splits are named {', '.join(SPLIT_OF)}"
            notes.append(f"{root / name} is left out: {why}.")
        of_folder: dict[str, list[Item]] = {}  # by <class>, or by <split>/<class>
        for item in every:
            *folders, _ = item.name.split("/", 2 if splits else 1)
            of_folder.setdefault("/".join(folders) if len(folders) == (2 if splits else 1) else "", []).append(item)
        items: list[Item] = []
        for part, split in sorted(splits.items(), key=lambda item: (item[1], item[0])) or [("", TRAIN)]:
            labels = ("images", "masks") if self.target == "mask" else ordered_classes(tree[part] if part else tree)
            for label in labels:
                name = f"{part}/{label}" if part else label
                found = of_folder.pop(name, [])
                if not found and split == TRAIN:
                    other = {why: sum(each.startswith(f"{name}/") for each in names) for why, names in left_out.items()}
                    counts = ", ".join(f"{count} {why}" for why, count in other.items() if count) or "nothing"
                    raise UserError(f"{root / name} holds no images (left out: {counts}): add some or remove it.")
                inner = {item.name[len(name) + 1 :].rpartition("/")[0].partition("/")[0] for item in found}
                if len(inner) > 1 and "" not in inner:
                    some = ", ".join(sorted(inner)[:5])
                    notes.append(f"{root / name} counts as one class and holds only folders ({some}). Is it right?")
                for item in found:
                    item.label, item.split = label, split
                    item.group = group_of(self.group, item.name) if self.group else None
                items += found
        if outside := [item.name for others in of_folder.values() for item in others]:
            left_out["images outside of class folders"] = outside
        if self.target == "mask":
            items = self._with_masks(items)
        return ImageList(root, items, left_out=left_out, notes=notes, target=self.target)

    def _with_masks(self, items: list[Item]) -> list[Item]:
        """Return the images with their masks as labels: …/images/NAME.jpg has the mask …/masks/NAME.*

        Raises:
            UserError: an image has none.
        """
        mask_of = {os.path.splitext(item.name)[0]: item.name for item in items if item.label == "masks"}
        images = [item for item in items if item.label == "images"]
        for item in images:
            folder, _, name = os.path.splitext(item.name)[0].rpartition("images/")
            if f"{folder}masks/{name}" not in mask_of:
                raise UserError(f"{self._root / item.name} has no mask {self._root / folder / 'masks' / name}.png.")
            item.label = mask_of[f"{folder}masks/{name}"]
        return images
