"""The base of data modules whose encoded images lie on a disk, listed with labels and splits.

On `array`'s path all are decoded once per node. On `loader`'s path the list alone is made: no image is opened before it
is needed, unless `verify` or `skip_corrupt` asks for a look at all of them first. Images that lie in a bucket are then
read from there until their copy is on this disk.
"""

import dataclasses
import logging
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.batches import TEST, random_stream
from lockstep.data.image_array import Layout
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.image_list import ImageList, hash_of_names, kept_list
from lockstep.data.image_set import DECODED, LABELS, ImageSet, fingerprint
from lockstep.data.image_source import InPlaces, Source
from lockstep.data.image_tree import MAX_PIXELS, common_size, decode_all, fitted, open_image
from lockstep.data.node_cache import Content, require_space
from lockstep.data.places import InBucket, Remote
from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)

TEST_SEED = 42  # of the test images that are drawn: every seed trains on others than these
LIST_VERSION = 2
SAMPLE = 64  # images that tell, where the first batch is made, whether all are small squares of one size
UNKNOWN = 0  # the size at which images would be stored, before anyone has opened them
WHOLE_IMAGES = "the augmentation needs whole images, and in an array they would be resized to {} px already"
HINT = ", or skip such files with data.skip_corrupt=true"


class ListedDataModule(ImageDataModule):
    """A subclass says where the images are (`listed_from`, `list_images`).

    Images that are not all small squares of one size are resized (`resize`, `fit`) when they are decoded.

    Args:
        root: what lists the images.
        channels: 3 for colour, 1 for grey.
        test_fraction: where no images are to test on: part of all, the same under every seed.
        skip_corrupt: leave out images that cannot be decoded, and count them, instead of ending with an error.
        verify: decode every image once before the run starts, also where it then reads them from their files.
        fit: crop keeps an image's proportions and cuts its long side off, squash distorts it to a square.
        memory_limit_gib: beyond this array size images stay in their files.
        max_pixels: what has more is refused before it is decoded.
        cache_gib: of a root in a bucket, for whoever copies it (training/local_root.py).
    Attributes:
        in_bucket: of a root in a bucket; set before `prepare`, which lets go of it.
    """

    in_bucket: InBucket | None = None
    _reads: Remote | None = None  # of a bucket, whose copy may be a part
    own_mean: Sequence[float] = (0.485, 0.456, 0.406)  # of ImageNet
    own_std: Sequence[float] = (0.229, 0.224, 0.225)

    def __init__(
        self,
        *,
        root: Path,
        name: str,
        image_size: int = 224,
        channels: int = 3,
        test_fraction: float = 0.1,
        fit: str = "crop",
        skip_corrupt: bool = False,
        verify: bool = False,
        memory_limit_gib: float = 16.0,
        max_pixels: int = MAX_PIXELS,
        cache_gib: float | None = None,
        **options: Any,
    ) -> None:
        if channels not in (1, 3):
            raise UserError(f"data.channels={channels} must be 3 (colour) or 1 (grey).")
        self.channels, self.fit = channels, fit
        if channels == 1:
            self.own_mean, self.own_std = (0.449,), (0.226,)
        super().__init__(name=name, image_size=image_size, **options)
        self._root, self._test_fraction = root, test_fraction
        self._skip_corrupt, self._verify = skip_corrupt, verify
        self._memory_limit_gib, self._max_pixels = memory_limit_gib, max_pixels

    # What a subclass says

    def listed_from(self) -> list[Any]:
        """The options that the list depends on, as JSON values."""
        raise NotImplementedError

    def list_images(self) -> ImageList:
        """Called once per node, when the list is not there or out of date.

        Raises:
            UserError: there is nothing to list, or it does not fit together.
        """
        raise NotImplementedError

    # The list

    def identity(self) -> Any:
        key = fingerprint([LIST_VERSION, type(self).__name__, self.stage, str(self._root), *self.listed_from()])
        self._list_folder = self.cache_dir / f"{self.name}-list-{key[:16]}"
        self._images, self._list_facts = kept_list(self._list_folder, self._listed, exact=False)
        self._taken = self._choose_path()
        if self.in_bucket is not None and self._opens_all:
            self.in_bucket.complete()
        elif self.in_bucket is not None and not self.in_bucket.complete_beside():
            self._reads = self.in_bucket.reads
        if self._opens_all:
            self._images, self._list_facts = kept_list(self._list_folder, self._listed, exact=True)
        self.in_bucket = None  # it may list a million objects
        if not self._images.counts[2]:
            self._num_drawn(self._images.counts[0])
        return [
            self.stage,
            self._list_facts["identity"],
            self.channels,
            self._skip_corrupt,
            self._verify,
            self._taken[0],
            self._memory_limit_gib,
            self._max_pixels,
            self.fit,
            self.framing.interpolation,
            self._pipeline is None,
        ]

    def _listed(self) -> ImageList:
        images = self.list_images()
        if self.in_bucket is None:
            return images
        places = images.places.of_objects(self.in_bucket.etags(), self.in_bucket.folder)
        return dataclasses.replace(images, places=places, watched=())  # another bucket's content is another folder

    @property
    def _opens_all(self) -> bool:
        return self._taken[0] == "array" or self._verify or self._skip_corrupt

    def _choose_path(self) -> tuple[str, str]:
        """array or loader, and why; opens no image."""
        if self.requested_path == "auto" and self._pipeline is not None:
            return "loader", WHOLE_IMAGES.format(self.resize)
        if self.requested_path == "auto" and (gib := self._gib(self.resize)) > self._memory_limit_gib:
            return "loader", self._too_much(gib)
        return super().path_taken()

    def _gib(self, size: int) -> float:
        return len(self._images.labels) * size**2 * self.channels / 2**30

    def _too_much(self, gib: float) -> str:
        return f"{gib:.3g} GiB of images are more than data.memory_limit_gib={self._memory_limit_gib:g}"

    def _num_drawn(self, n: int) -> int:
        num_test = round(self._test_fraction * n)
        if self.stage == "test":
            return min(max(num_test, 1), n)
        if not 1 <= num_test < n:
            raise UserError(
                f"data.test_fraction={self._test_fraction} of {n} images leaves {n - num_test} to train and {num_test} "
                "to test on: both need one at least."
            )
        return num_test

    def _read_facts(self, meta: Content, fit: np.ndarray | None = None) -> None:
        if meta["num_test"]:
            super()._read_facts(meta)
            return
        num_test, self.test_is_drawn = self._num_drawn(meta["num_fit"]), True
        order = random_stream(TEST_SEED, TEST).permutation(meta["num_fit"])
        fit, test = np.sort(order[num_test:]), np.sort(order[:num_test])
        super()._read_facts({**meta, "num_fit": len(fit), "num_test": num_test}, fit)
        self._check_classes(self._labels[fit])
        self.data_hash = fingerprint([self.data_hash, test.tolist()])
        self._test_index = test

    # What the node keeps

    def _build(self, part: Path) -> Content:
        path, why = self._taken
        side = self._common_side(range(len(self._images.labels))) if self._opens_all else None
        self._stored_size = side or self.resize
        if path == "array":
            self._check_array(whole=side is not None)
            return {**super()._build(part), "path": path, "why": why}
        failures = self._decode(None) if self._opens_all else {}
        kept = self._kept(failures)
        images = self._image_set(np.zeros((0, 1, 1, self.channels)), kept, failures)
        places = self._images.places.take(kept) if failures else self._images.places
        places.save(part)
        np.save(part / LABELS, images.labels)
        data_hash = hash_of_names(places) if failures else self._list_facts["data_hash"]
        layout = Layout(self._stored_size if self._opens_all else UNKNOWN, self.channels, len(kept))
        return {**self._content(images, layout, data_hash), "path": path, "why": why}

    def read(self, scratch: Path) -> ImageSet:
        n, size = len(self._images.labels), self._stored_size
        shape = (n, size, size, self.channels)
        require_space(scratch, int(np.prod(shape)))
        images = np.memmap(scratch / DECODED, np.uint8, "w+", shape=shape)
        failures = self._decode(images)
        kept = self._kept(failures)
        for position, i in enumerate(kept):
            if position != i:
                images[position] = images[i]
        images.flush()
        os.truncate(scratch / DECODED, len(kept) * images[0].nbytes)
        return self._image_set(images[: len(kept)], kept, failures)

    def _common_side(self, positions: Iterable[int]) -> int | None:
        """Of these images, where all are squares of one size up to `resize`: an array holds them as they are."""
        places, reads = self._images.places, self._reads
        if reads is not None:
            positions = list(positions)
            places.ahead(positions, reads)
        found = common_size(partial(places.open, i, self._max_pixels, reads) for i in positions)
        if reads is not None:
            reads.rest()
        return found if found and found <= self.resize else None

    def _check_array(self, *, whole: bool) -> None:
        """
        Args:
            whole: it would hold the pictures as they are.
        Raises:
            UserError: an array was asked for, and cannot be.
        """
        against = ""
        if (gib := self._gib(self._stored_size)) > self._memory_limit_gib:
            against = self._too_much(gib)
        elif self._pipeline is not None and not whole:
            against = WHOLE_IMAGES.format(self.resize)
        if against:
            raise UserError(f"data.path=array cannot be: {against}. Take data.path=auto.")

    def _decode(self, out: np.ndarray | None) -> dict[int, str]:
        """Decode everything; without `out` only to see whether it can be decoded."""
        count = len(self._images.labels)
        hint = "" if self._skip_corrupt else HINT
        failures = decode_all(count, self._decode_one, skip_corrupt=self._skip_corrupt, out=out, hint=hint)
        if failures:
            first = next(iter(failures.values()))
            log.warning(f"Skipped {len(failures)} of {count} images: {first}; …")
        return failures

    def _decode_one(self, i: int) -> np.ndarray:
        places = self._images.places
        image = open_image(places.open(i, self._max_pixels), self.channels, self._max_pixels, name=places.name(i))
        return fitted(image, self.framing, self._stored_size, lambda: places.name(i))

    def _kept(self, failures: dict[int, str]) -> np.ndarray:
        kept = np.delete(np.arange(len(self._images.labels)), list(failures))
        self._check_classes(self._images.labels[kept[kept < self._images.counts[0]]])
        return kept

    def _check_classes(self, labels: np.ndarray) -> None:
        if self.stage == "test":
            return
        left = np.unique(labels)
        for label, name in enumerate(self._images.class_names):
            if label not in left:
                raise UserError(f"{self._root}: the class {name} has no training image that can be decoded: add some.")

    def _image_set(self, images: np.ndarray, kept: np.ndarray, failures: dict[int, str]) -> ImageSet:
        counts = self._images.counts
        ends = np.searchsorted(kept, np.cumsum(counts))
        num_fit, num_val, num_test = (int(n) for n in np.diff(ends, prepend=0))
        labels, skipped = self._images.labels[kept], [*self._images.skipped, *failures.values()]
        return ImageSet(images, labels, self._images.class_names, num_fit, num_test, num_val, skipped, not counts[2])

    # Where workers find them

    def path_taken(self) -> tuple[str, str]:
        return self._meta["path"], self._meta["why"]

    def _layout(self) -> Layout:
        layout, n = super()._layout(), len(self._images.labels)
        if layout.size != UNKNOWN:
            return layout
        sample = np.linspace(0, n - 1, min(n, SAMPLE)).astype(int)
        return dataclasses.replace(layout, size=self._common_side(sample) or self.resize)

    def _image_source(self) -> Source:
        if self._meta["path"] == "array":
            return super()._image_source()
        folder = self._images.places.folder
        return InPlaces(self._cache, folder, self._list_folder, self.channels, self._max_pixels, self._reads)
