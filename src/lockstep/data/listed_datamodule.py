"""The base of data modules that list their encoded images before reading them.

The images lie in files, tables or shards.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.content_hash import hash_of_files
from lockstep.data.decoding import CorruptImage, decode_all, open_image, pixels_of
from lockstep.data.image_datamodule import CHECK, ImageDataModule
from lockstep.data.listing import ImageList, fingerprint
from lockstep.data.loading import OpenSample
from lockstep.data.node_cache import Content, cached
from lockstep.data.report import identical_images
from lockstep.data.targets import (
    as_masks,
    classes_of_pixels,
    grey_levels_of,
    levels_in,
    mask_classes,
    note_on_levels,
)
from lockstep.process.errors import UserError

CACHE_VERSION = 8
IMAGES = "images.npy"


class ListedDataModule(ImageDataModule):
    """Labelled images of any size, listed by the subclass.

    With path="array" all images are decoded once per node into one array, with path="loader" when
    a batch needs them.

    Args:
        test_fraction: share of all images that tests if the source defines no test split; it is
            the same under every seed.
        fit: crop or squash, as of Framing.
        group: table column, or regular expression on the path, whose value identifies images to
            keep in one split.
        splits: whether folders, files or a column name splits; auto: where they have such names.
        unknown: the number of several labels that means "not known" (nan in a batch); None: none.
        max_megapixels: the largest image that is decoded, in millions of pixels; None: Pillow's
            limit, 179.
        options: as of ImageDataModule.
    """

    own_mean: Sequence[float] = (0.485, 0.456, 0.406)  # ImageNet statistics
    own_std: Sequence[float] = (0.229, 0.224, 0.225)
    array_limit_gib = 16.0  # path="auto" chooses the loader above this decoded size
    target_choices: tuple[str, ...] = ("class", "number")

    def __init__(
        self,
        *,
        image_size: int = 224,
        channels: int = 3,
        test_fraction: float = 0.1,
        fit: str = "crop",
        group: str | None = None,
        target: str = "class",
        splits: bool | str = "auto",
        unknown: float | None = None,
        max_megapixels: float | None = None,
        **options: Any,
    ) -> None:
        if target not in self.target_choices:
            raise UserError(
                f"data.target={target} must be one of {', '.join(self.target_choices)}."
            )
        if channels not in (1, 3):
            raise UserError(f"data.channels={channels} must be 3 (colour) or 1 (grey).")
        if splits not in ("auto", True, False):
            raise UserError(f"data.splits={splits} must be one of auto, true, false.")
        if max_megapixels is not None and max_megapixels <= 0:
            raise UserError(f"data.max_megapixels={max_megapixels} must be positive, or null.")
        self.channels = channels
        self.fit = fit
        self.group = group
        self.target = target
        self.splits_option = splits
        self.unknown = unknown
        self.max_megapixels = max_megapixels
        if channels == 1:
            self.own_mean = (0.449,)
            self.own_std = (0.226,)
        super().__init__(image_size=image_size, **options)
        self.split = replace(self.split, test_fraction=test_fraction)

    def list_images(self) -> ImageList:
        """
        Raises:
            UserError: there is nothing to list, or it does not fit together.
        """
        raise NotImplementedError

    def refuse_faults(self, faults: list[str], rest: Collection[Any], hint: str = "") -> None:
        """Refuse images that are listed and cannot be used; check_data.py lists all of them.

        Args:
            faults: a sentence for each.
            rest: the images that can be used.
            hint: how to avoid them.
        Raises:
            UserError: there are faults, and it is no check or no image is left.
        """
        if self.stage == CHECK and rest:
            self.faults += [fault if not hint else f"{fault} {hint}" for fault in faults]
            return
        if not faults:
            return
        sentences = [faults[0], hint]
        if len(faults) > 1:
            sentences.append(
                f"{len(faults) - 1} more cannot be used: `python src/check_data.py` lists them."
            )
        raise UserError(" ".join(filter(None, sentences)))

    def cache_folder(self, identity: Any) -> Path:
        """Return the folder on this node for what depends on `identity`, JSON values."""
        key = fingerprint([CACHE_VERSION, type(self).__name__, identity])
        return self.cache_dir / f"{self.name}-{key[:16]}"

    def _load(self) -> None:
        self._load_list()
        self._check_unknown()
        self.data_hash = self._hash()
        if self.path_taken()[0] == "array":
            folder = self._array_folder()
            cached(folder, self._write_array)
            self._pixels = [np.load(folder / IMAGES, mmap_mode="c")]

    def _load_list(self) -> None:
        """Set all but the hash and the pixels."""
        images = self.list_images()
        self._list = images
        self.class_names = images.class_names
        self._given = images.splits
        self._groups = images.groups
        self.left_out = images.left_out
        self.warnings = images.warnings
        self.list_hash = images.content_hash()
        if images.has_masks:
            self._set_targets({}, [""])
            self._name_mask_classes()
        else:
            self._set_targets({"": images.targets}, [])

    def _hash(self) -> str:
        return hash_of_files(self._list)

    def _name_mask_classes(self) -> None:
        """Read all masks once per node for the grey levels in them."""
        folder = self.cache_folder(["grey levels", self._list.identity])
        levels = cached(folder, self._read_levels)["levels"]
        self.class_names = mask_classes(levels)
        self.warnings += note_on_levels(self.class_names)

    def _read_levels(self, _: Path) -> Content:
        levels: list[set[int]] = [set() for _ in range(len(self._list))]

        def read(i: int) -> None:
            levels[i] = set(levels_in([self._list.read_mask(i)]))

        decode_all(len(self._list), read)
        return {"levels": sorted(set().union(*levels))}

    def _check_unknown(self) -> None:
        if self.unknown is not None and self.target_kind not in ("labels", "dict"):
            raise UserError(
                f"data.unknown={self.unknown} is for several labels of each image: give "
                "data.label_columns=[a,b], or leave it out."
            )

    def _array_folder(self) -> Path:
        decoding = [
            self.channels,
            self.resize,
            self.image_size,
            self.fit,
            self.framing.interpolation,
        ]
        return self.cache_folder([self._list.identity, decoding])

    def path_taken(self) -> tuple[str, str]:
        if self._mask_names:
            return "loader", "masks are read with their images"
        if self._pipeline is not None and self.requested_path != "loader":
            why = (
                "single images are augmented, and an array would hold them resized to "
                f"{self.resize} px"
            )
            if self.requested_path == "array":
                raise UserError(f"data.path=array is not possible: {why}. Set data.path=auto.")
            return "loader", why
        gib = len(self._list) * self.resize**2 * self.channels / 2**30
        if self.requested_path == "auto" and gib > self.array_limit_gib:
            why = (
                f"the decoded images take {gib:.3g} GiB, the limit is {self.array_limit_gib:g} GiB"
            )
            return "loader", why
        return super().path_taken()

    def _write_array(self, folder: Path) -> Content:
        """Decode all images into the array file in `folder`."""
        n = len(self._list)
        shape = (n, self.resize, self.resize, self.channels)
        path = folder / IMAGES
        out = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        # A disk that is full would otherwise kill the process later.
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, out.offset + out.nbytes)
        open_one = self.sample_opener()

        def decode_one(i: int) -> None:
            out[i] = pixels_of(self.framing.square(open_one(i)[0]))

        decode_all(n, decode_one)
        out.flush()
        return {}

    def image_name(self, position: int) -> str:
        return self._list.name(position)

    def where(self, position: int) -> str:
        name = self.image_name(position)
        line = int(self._list.lines[position])
        return f"{name} (line {line})" if line else name

    def identical_images(self, limit: int | None = None) -> dict[str, list[str]]:
        index = np.flatnonzero(self.splits.of_each >= 0)
        with suppress(CorruptImage):  # The loader names the image.
            return identical_images(self, self._list.size[index], index, self._list.read, limit)
        return {}

    def sample_opener(self) -> OpenSample:
        """Return what opens an image and its mask where they lie."""
        levels = grey_levels_of(self.class_names) if self._list.has_masks else None
        return FileOpener(self._list, self.channels, levels, self.max_megapixels)


@dataclass(frozen=True)
class FileOpener:
    """Open an image and its mask by their position in a list."""

    images: ImageList
    channels: int
    grey_levels: list[int] | None  # of each class in masks; None: masks have the classes' numbers
    max_megapixels: float | None

    def __call__(self, position: int) -> tuple[Any, ...]:
        image = open_image(
            self.images.read(position),
            self.channels,
            name=self.images.path(position),
            max_megapixels=self.max_megapixels,
        )
        if not self.images.has_masks:
            return (image,)
        mask = self.images.read_mask(position)
        if mask.shape[::-1] != image.size:
            raise CorruptImage(
                f"the mask of {self.images.path(position)} has {mask.shape[1]}×{mask.shape[0]} "
                f"pixels and its image {image.width}×{image.height}"
            )
        return image, *as_masks([classes_of_pixels(mask, self.grey_levels)])
