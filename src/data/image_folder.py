"""Images of one's own, one folder per class."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.image_list import SPLITS, ImageList
from lockstep.data.image_tree import Listing, list_split
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.places import Places, stats_of
from lockstep.data.root import on_this_disk, what_reads
from lockstep.runs.errors import UserError


class ImageFolderDataModule(ListedDataModule):
    """root/train/<class>/ and root/test/<class>/ (and root/val/<class>/ where it exists), or only root/<class>/.

    Args:
        root: the folder.
        options: as of ListedDataModule.
    """

    def __init__(self, *, root: str | Path | None = None, name: str = "image_folder", **options: Any) -> None:
        if not root:
            raise UserError("data=image_folder needs data.root=FOLDER, with one folder of images per class.")
        super().__init__(root=on_this_disk(root), name=name, **options)

    def listed_from(self) -> list[Any]:
        return []

    def list_images(self) -> ImageList:
        try:
            return self._in_one_list(list(self._parts()))
        except UserError as error:
            raise UserError(f"{error}{what_reads(self._root, 'image_folder')}") from None

    def _parts(self) -> Iterator[tuple[str, Listing]]:
        """The splits' names, the first empty where there are none, with their images."""
        if not (self._root / "train").is_dir():
            folder = self._root / "test"
            alone = self.stage == "test" and folder.is_dir() and any(path.is_dir() for path in folder.iterdir())
            yield ("test/", list_split(folder)) if alone else ("", list_split(self._root))
            return
        if not (self._root / "test").is_dir():
            raise UserError(
                f"{self._root} has train/ and no test/, which tests the finished run: name a part of it so, or give a "
                "folder that holds the classes alone (data.test_fraction of it then tests)."
            )
        for split in SPLITS:
            if split != "val" or (self._root / split).is_dir():
                yield f"{split}/", list_split(self._root / split)

    def _in_one_list(self, parts: list[tuple[str, Listing]]) -> ImageList:
        first = parts[0][1]
        for _, part in parts[1:]:
            if part.class_names != first.class_names:
                different = sorted(set(part.class_names) ^ set(first.class_names))
                raise UserError(
                    f"{self._root}: not every part has the classes {', '.join(different)}: give all the same."
                )
        names = [f"{split}{name}" for split, part in parts for name in part.names]
        try:
            places = Places.of_files(self._root, names, stats_of(self._root, names))
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read ({error.strerror}): mend or remove it.") from None
        counts = {split: len(part.names) for split, part in parts}
        return ImageList(
            first.class_names,
            np.concatenate([part.labels for _, part in parts]),
            (counts.get("", counts.get("train/", 0)), counts.get("val/", 0), counts.get("test/", 0)),
            places,
            [str(self._root), *(folder for _, part in parts for folder in part.folders)],
        )
