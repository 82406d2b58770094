"""Images in folders, one folder per class."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.folder_layout import FolderLayout, find_split_folders
from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import (
    TRAIN,
    Item,
    LeftOut,
    describe_counts,
    list_files,
    match_group,
    resolve_root,
    sort_classes,
)
from lockstep.process.errors import UserError


class ImageFolderDataModule(ListedDataModule):
    """Images in root/<class>/, or in root/train/<class>/ beside val/ and test/ or similar names.

    With target=mask the folders images/ and masks/ stand in place of the classes. An image and its
    mask have the same name, except for the ending.
    """

    target_choices = ("class", "number", "mask")

    def __init__(
        self, *, root: str | Path | None = None, name: str = "image_folder", **options: Any
    ) -> None:
        super().__init__(name=name, **options)
        self._root = resolve_root(root, "a folder with one folder of images per class")

    def list_images(self) -> ImageList:
        self._check_root()
        left_out: LeftOut = {}
        folders: list[str] = []
        images = list_files(self._root, left_out, folders)
        layout = FolderLayout.from_listing(self._root, folders, images)
        if not layout.subfolders:
            raise UserError(
                f"{self._root} has no class folders: put the images into {self._root}/<class>/."
            )
        splits, warning = find_split_folders(
            layout, self.splits_option, holds_classes=self.target == "class"
        )

        by_folder: dict[str, list[Item]] = {
            folder: [] for folder in self._list_label_folders(layout, splits)
        }
        for item in images:
            folder = _get_label_folder(item.name, has_splits=bool(splits))
            if folder in by_folder:
                by_folder[folder].append(item)
            else:
                left_out.setdefault(_explain_left_out(item.name, splits), []).append(item.name)

        labelled: list[Item] = []
        for folder, items in by_folder.items():
            split_folder, _, label = folder.rpartition("/")
            split = splits.get(split_folder, TRAIN)
            if not items and split == TRAIN:
                raise self._no_images_error(folder, left_out)
            labelled += self._label_items(items, label, split)
        if self.target == "mask":
            labelled = self._pair_with_masks(labelled)
        return ImageList(
            self._root,
            labelled,
            left_out=left_out,
            target=self.target,
            warnings=[warning] if warning else [],
        )

    def _check_root(self) -> None:
        root = self._root
        if not root.is_dir():
            fault = "is a file" if root.exists() else "does not exist"
            raise UserError(
                f"data.root={root} {fault}: give a folder with one folder of images per class."
            )

    def _list_label_folders(self, layout: FolderLayout, splits: dict[str, int]) -> list[str]:
        """Return the folders of labels, <class> or <split>/<class>, sorted by split and class."""
        if not splits:
            return self._sort_labels(layout.subfolders)
        folders = []
        for split_folder in sorted(splits, key=lambda name: (splits[name], name)):
            labels = self._sort_labels(layout.subfolders[split_folder])
            folders += [f"{split_folder}/{label}" for label in labels]
        return folders

    def _sort_labels(self, folders: Iterable[str]) -> list[str]:
        return ["images", "masks"] if self.target == "mask" else sort_classes(folders)

    def _no_images_error(self, folder: str, left_out: LeftOut) -> UserError:
        """Return the error on a folder to train on that holds no images."""
        excluded = {}
        for reason, names in left_out.items():
            below = [name for name in names if name.startswith(f"{folder}/")]
            if below:
                excluded[reason] = below
        return UserError(
            f"{self._root / folder} holds no images (left out: {describe_counts(excluded)}): "
            "add some or remove it."
        )

    def _label_items(self, items: list[Item], label: str, split: int) -> list[Item]:
        """Set label, split and group of images, and return them."""
        for item in items:
            item.label = label
            item.split = split
            if self.group:
                item.group = match_group(self.group, item.name)
        return items

    def _pair_with_masks(self, items: list[Item]) -> list[Item]:
        """Return the images labelled with their masks: images/NAME.* has masks/NAME.*."""
        masks = {os.path.splitext(item.name)[0]: item.name for item in items if _is_mask(item)}
        images = []
        faults = []
        for item in items:
            if _is_mask(item):
                continue
            # A slash in front: the folder of a split may be named train_images.
            path = os.path.splitext(f"/{item.name}")[0]
            stem = path.replace("/images/", "/masks/", 1)[1:]
            if stem in masks:
                item.label = masks[stem]
                images.append(item)
            else:
                faults.append(f"{self._root / item.name} has no mask {self._root / stem}.png.")
        self.refuse_faults(faults, images)
        return images


def _is_mask(item: Item) -> bool:
    return item.label == "masks"


def _get_label_folder(name: str, *, has_splits: bool) -> str:
    """Return the first folder of a path, or the first two folders if the first is a split."""
    return "/".join(name.split("/", 2 if has_splits else 1)[:-1])


def _explain_left_out(name: str, splits: dict[str, int]) -> str:
    top, _, rest = name.partition("/")
    if splits and rest:
        return f"images in {top}/, which is no split of class folders"
    return "images outside of class folders"
