"""Images in WebDataset's tar files."""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

from data.shards import Shards
from lockstep.data.decoding import SUFFIXES
from lockstep.data.image_list import ImageList
from lockstep.data.listed_datamodule import ListedDataModule
from lockstep.data.listing import LeftOut, without_arrays
from lockstep.data.node_cache import Metadata
from lockstep.process.errors import UserError

HINT_ON_FIELD = " (where a key.json holds the label: data.label_field=FIELD)"


class WebDatasetDataModule(ListedDataModule):
    """Uncompressed tar files with key.jpg beside key.cls or key.json. They are read in place.

    NumPy files are images if a tar file has no other images. configs/data/webdataset.yaml explains
    the options.
    """

    def __init__(
        self, *, root: str | Path | None = None, label_field: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._label_field = label_field
        self._label_suffix = ".json" if label_field else ".cls"
        # The word "arrays" keeps listings apart from those of versions that left NumPy files out.
        depends_on = [label_field, "arrays"]
        self._shards = Shards(self, root, ".tar", self._read_shard, depends_on)

    def list_images(self) -> ImageList:
        return self._shards.list_images()

    def _read_shard(self, path: Path, folder: Path) -> Metadata:
        left_out: LeftOut = {}
        images: list[tarfile.TarInfo] = []
        # The content of each label by its key.
        labels: dict[str, bytes] = {}
        try:
            with tarfile.open(path, "r:") as archive:
                for member in filter(tarfile.TarInfo.isfile, archive):
                    self._sort_member(archive, member, images, labels, left_out)
                if archive.offset > path.stat().st_size:
                    raise EOFError("it ends within a member")
        except (tarfile.TarError, EOFError, OSError) as error:
            raise UserError(
                f"{path} is cut off or no uncompressed tar file ({error}): repair or remove it."
            ) from None

        items = []
        image_of_key: dict[str, str] = {}
        for member in without_arrays(images, left_out, "members"):
            key = self._find_label_key(path, member.name, labels)
            first_image = image_of_key.setdefault(key, member.name)
            if first_image != member.name:
                raise UserError(
                    f"{path}: {first_image} and {member.name} have one label: keep one image for "
                    "each key."
                )
            label = self._parse_label(path, key, labels[key])
            items.append((member.name, label, member.offset_data, member.size, None))
        return {"items": items, "data": None, "left_out": left_out, "splits": []}

    def _sort_member(
        self,
        archive: tarfile.TarFile,
        member: tarfile.TarInfo,
        images: list[tarfile.TarInfo],
        labels: dict[str, bytes],
        left_out: LeftOut,
    ) -> None:
        """Add one member to the images, the labels or what is left out."""
        key, ending = os.path.splitext(member.name)
        ending = ending.lower()
        if os.path.basename(member.name).startswith("."):
            left_out.setdefault("hidden members", []).append(member.name)
        elif ending == self._label_suffix:
            labels[key] = archive.extractfile(member).read()
        elif ending in SUFFIXES:
            images.append(member)
        else:
            left_out.setdefault(f"{ending or 'nameless'} members", []).append(member.name)

    def _find_label_key(self, path: Path, name: str, labels: dict[str, bytes]) -> str:
        """Return the key of an image's label: its name up to its last dot, or to its first dot."""
        folder, base = os.path.split(name)
        for key in (os.path.splitext(name)[0], os.path.join(folder, base.partition(".")[0])):
            if key in labels:
                return key
        hint = "" if self._label_field else HINT_ON_FIELD
        raise UserError(f"{path}: {name} has no {self._label_suffix} file beside it{hint}.")

    def _parse_label(self, path: Path, key: str, content: bytes) -> str:
        try:
            label = content.decode().strip()
            if self._label_field:
                label = json.loads(content)[self._label_field]
            if label == "" or not isinstance(label, str | int | float):
                raise ValueError(f"{str(label)[:50]!r} is neither text nor a number")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}: {key}{self._label_suffix} holds no label ({type(error).__name__}: "
                f"{error})."
            ) from None
        return str(label)
