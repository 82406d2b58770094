"""Base class of data modules that list their encoded images (in files, tables or shards) before reading them."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.decoding import CorruptImage, decode_all, open_image, pixels_of
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.listing import ImageList, fingerprint
from lockstep.data.loading import OpenSample
from lockstep.data.node_cache import Content, cached
from lockstep.data.report import identical_images
from lockstep.data.targets import BINARY, VOID, as_masks, hash_of, mask_classes
from lockstep.runs.errors import UserError

CACHE_VERSION, IMAGES = 8, "images.npy"


class ListedDataModule(ImageDataModule):
    """Labelled images of any size, listed by the subclass.

    With path="array" all images are decoded once per node into one array, with path="loader" when a batch needs them.

    Args:
        test_fraction: share of all images that tests if the source defines no test split; independent of the seed.
        fit: crop or squash, as of Framing.
        group: table column, or regular expression on the path, whose value identifies images to keep in one split.
        options: as of ImageDataModule.
    """

    own_mean: Sequence[float] = (0.485, 0.456, 0.406)  # ImageNet statistics
    own_std: Sequence[float] = (0.229, 0.224, 0.225)
    array_limit_gib = 16.0  # path="auto" chooses the loader above this decoded size
    target_choices: tuple[str, ...] = ("class", "number")

    def __init__(
        self, *, image_size: int = 224, channels: int = 3, test_fraction: float = 0.1, fit: str = "crop",
        group: str | None = None, target: str = "class", **options: Any,
    ) -> None:  # fmt: skip
        if target not in self.target_choices:
            raise UserError(f"data.target={target} must be one of {', '.join(self.target_choices)}.")
        if channels not in (1, 3):
            raise UserError(f"data.channels={channels} must be 3 (colour) or 1 (grey).")
        self.channels, self.fit, self.group, self.target = channels, fit, group, target
        if channels == 1:
            self.own_mean, self.own_std = (0.449,), (0.226,)
        super().__init__(image_size=image_size, **options)
        self.split = replace(self.split, test_fraction=test_fraction)

    def list_images(self) -> ImageList:
        """
        Raises:
            UserError: there is nothing to list, or it does not fit together.
        """
        raise NotImplementedError

    def cache_folder(self, identity: Any) -> Path:
        """Return the folder on this node for what depends on `identity`, JSON values."""
        return self.cache_dir / f"{self.name}-{fingerprint([CACHE_VERSION, type(self).__name__, identity])[:16]}"

    def _load(self) -> None:
        self._list = images = self.list_images()
        self.class_names, self._given, self._groups = images.class_names, images.splits, images.groups
        self.left_out, self.list_hash = images.left_out, images.content_hash()
        self._set_targets({} if images.has_masks else {"": images.targets}, [""] if images.has_masks else [])
        if images.has_masks:
            folder = self.cache_folder(["masks", images.identity])
            found = cached(folder, lambda _: {"classes": mask_classes(len(images), images.read_mask)})
            self.class_names = found["classes"]
        if self.path_taken()[0] == "array":
            decoding = [self.channels, self.resize, self.image_size, self.fit, self.framing.interpolation]
            folder = self.cache_folder([images.identity, decoding])
            self.data_hash = cached(folder, self._write_array)["data_hash"]
            self._pixels = [np.load(folder / IMAGES, mmap_mode="c")]
        else:
            self.data_hash = self.list_hash

    def path_taken(self) -> tuple[str, str]:
        if self._mask_names:
            return "loader", "masks are read with their images"
        if self._pipeline is not None and self.requested_path != "loader":
            why = f"single images are augmented, and an array would hold them resized to {self.resize} px"
            if self.requested_path == "array":
                raise UserError(f"data.path=array is not possible: {why}. Set data.path=auto.")
            return "loader", why
        gib = len(self._list) * self.resize**2 * self.channels / 2**30
        if self.requested_path == "auto" and gib > self.array_limit_gib:
            return "loader", f"the decoded images take {gib:.3g} GiB, the limit is {self.array_limit_gib:g} GiB"
        return super().path_taken()

    def _write_array(self, folder: Path) -> Content:
        """Decode all images into the array file in `folder`."""
        open_one, n = self.sample_opener(), len(self._list)
        shape = (n, self.resize, self.resize, self.channels)
        out = np.lib.format.open_memmap(folder / IMAGES, mode="w+", dtype=np.uint8, shape=shape)
        with (folder / IMAGES).open("r+b") as file:  # a disk that is full would kill the process later
            os.posix_fallocate(file.fileno(), 0, out.offset + out.nbytes)

        def decode_one(i: int) -> None:
            out[i] = pixels_of(self.framing.square(open_one(i)[0]))

        decode_all(n, decode_one)
        return {"data_hash": hash_of(out, self._targets, self.class_names, self._given)}

    def image_name(self, position: int) -> str:
        return self._list.name(position)

    def identical_images(self, limit: int | None = None) -> dict[str, list[str]]:
        index = np.flatnonzero(self.splits.of_each >= 0)
        with suppress(CorruptImage):  # which the loader names
            return identical_images(self, self._list.size[index], index, self._list.read, limit)
        return {}

    def sample_opener(self) -> OpenSample:
        """Return what opens an image and its mask where they lie."""
        return partial(_open_listed, self._list, self.channels, self.class_names == BINARY)


def _open_listed(images: ImageList, channels: int, is_binary: bool, position: int) -> tuple[Any, ...]:
    image = open_image(images.read(position), channels, name=images.path(position))
    if not images.has_masks:
        return (image,)
    mask = images.read_mask(position)
    if mask.shape[::-1] != image.size:
        sizes = f"{mask.shape[1]}×{mask.shape[0]} pixels and its image {image.width}×{image.height}"
        raise CorruptImage(f"the mask of {images.path(position)} has {sizes}")
    return image, *as_masks([(mask == VOID).astype(np.uint8) if is_binary else mask])
