"""Images in folders, one folder per class."""

from pathlib import Path
from typing import Any

from lockstep.data.folders import list_folder
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import ImageList, local_root, suggestion
from lockstep.runs.errors import UserError


class ImageFolderDataModule(ListedDataModule):
    """root/<class>/, or root/train/<class>/ beside val/ (valid/, dev/, …) and test/, in any case.

    Args:
        root: the folder.
        options: as of ListedDataModule.
    """

    def __init__(self, *, root: str | Path | None = None, name: str = "image_folder", **options: Any) -> None:
        super().__init__(name=name, **options)
        self._root = local_root(root, "image_folder", "FOLDER, with one folder of images per class")

    def list_images(self) -> ImageList:
        try:
            return list_folder(self._root, self.group)
        except UserError as error:
            raise UserError(f"{error}{suggestion(self._root, 'image_folder')}") from None
