"""Images of one's own, one folder per class: decoded once into an array, or read from their files when needed."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.batches import TEST, random_stream
from lockstep.data.image_array import Layout
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.image_set import DECODED, LABELS, ImageSet, fingerprint
from lockstep.data.image_source import InFiles, Source
from lockstep.data.image_tree import MAX_PIXELS, Listing, common_size, decode, decode_all, list_split
from lockstep.data.node_cache import Content, file_identity, require_space
from lockstep.runs.errors import UserError
from lockstep.runs.foreign_files import read_json

log = logging.getLogger(__name__)

TEST_SEED = 42  # of the test images that are drawn: every seed trains on others than these
FILES = "files.json"
MAX_NAMES_BYTES = 2**30  # ten million names
HINT = ", or skip such files with data.skip_corrupt=true"


class ImageFolderDataModule(ImageDataModule):
    """root/train/<class>/ and root/test/<class>/ (and root/val/<class>/ where it exists), or only root/<class>/.

    Images that are not all small squares of one size are resized (`resize`, `fit`) when they are decoded. An
    augmentation of single images works on whole pictures: then nothing but such squares goes into an array.

    Args:
        root: the folder.
        channels: 3 for colour, 1 for grey.
        test_fraction: where there is no test folder: part of all images, the same under every seed.
        skip_corrupt: leave out images that cannot be decoded, and count them, instead of ending with an error.
        fit: crop keeps an image's proportions and cuts its long side off, squash distorts it to a square.
        memory_limit_gib: beyond this array size images stay in their files.
        max_pixels: what has more is refused before it is decoded.
    """

    own_mean: Sequence[float] = (0.485, 0.456, 0.406)  # of ImageNet
    own_std: Sequence[float] = (0.229, 0.224, 0.225)

    def __init__(
        self,
        *,
        root: str | Path | None = None,
        name: str = "image_folder",
        image_size: int = 224,
        channels: int = 3,
        test_fraction: float = 0.1,
        fit: str = "crop",
        skip_corrupt: bool = False,
        memory_limit_gib: float = 16.0,
        max_pixels: int = MAX_PIXELS,
        **options: Any,
    ) -> None:
        if not root:
            raise UserError("data=image_folder needs data.root=FOLDER, with one folder of images per class.")
        if channels not in (1, 3):
            raise UserError(f"data.channels={channels} must be 3 (colour) or 1 (grey).")
        self.channels, self.fit = channels, fit
        if channels == 1:
            self.own_mean, self.own_std = (0.449,), (0.226,)
        super().__init__(name=name, image_size=image_size, **options)
        self._root, self._test_fraction = Path(root), test_fraction
        self._skip_corrupt, self._memory_limit_gib, self._max_pixels = skip_corrupt, memory_limit_gib, max_pixels

    def identity(self) -> Any:
        self._listing, self._counts = self._list()
        options = [
            self.channels,
            self._skip_corrupt,
            self._memory_limit_gib,
            self._max_pixels,
            self.fit,
            self.framing.interpolation,
            self.requested_path,
            self._pipeline is None,
            self._counts,
            self._listing.labels.tolist(),
        ]
        return [*options, [file_identity(path) for path in self._listing.files]]

    def _list(self) -> tuple[Listing, tuple[int, int, int]]:
        """All images, and how many are to fit on, to validate and to test on, in this order."""
        if not (self._root / "train").is_dir():
            return self._drawn()
        if not (self._root / "test").is_dir():
            raise UserError(
                f"{self._root} has train/ and no test/, which tests the finished run: name a part of it so, or give a "
                "folder that holds the classes alone (data.test_fraction of it then tests)."
            )
        parts = [list_split(self._root / split) for split in ("train", "val", "test") if self._has(split)]
        for part in parts[1:]:
            if part.class_names != parts[0].class_names:
                different = sorted(set(part.class_names) ^ set(parts[0].class_names))
                raise UserError(
                    f"{self._root}: not every part has the classes {', '.join(different)}: give all the same."
                )
        counts = [len(part.files) for part in parts]
        files = [file for part in parts for file in part.files]
        listing = Listing(parts[0].class_names, files, np.concatenate([part.labels for part in parts]))
        return listing, (counts[0], counts[1] if len(parts) == 3 else 0, counts[-1])

    def _has(self, split: str) -> bool:
        return split != "val" or (self._root / split).is_dir()

    def _drawn(self) -> tuple[Listing, tuple[int, int, int]]:
        """root/<class>/ alone: test images are drawn, and are the same under every seed, so that none is trained on."""
        listing = list_split(self._root)
        self._num_drawn(len(listing.files))
        return listing, (len(listing.files), 0, 0)

    def _num_drawn(self, n: int) -> int:
        num_test = round(self._test_fraction * n)
        if not 1 <= num_test < n:
            raise UserError(
                f"data.test_fraction={self._test_fraction} of {n} images leaves {n - num_test} to train and {num_test} "
                "to test on: both need one at least."
            )
        return num_test

    def _read_facts(self, meta: Content) -> None:
        if meta["num_test"]:
            super()._read_facts(meta)
            return
        num_test = self._num_drawn(meta["num_fit"])
        order = random_stream(TEST_SEED, TEST).permutation(meta["num_fit"])
        fit, test = np.sort(order[num_test:]), np.sort(order[:num_test])
        super()._read_facts({**meta, "num_fit": len(fit), "num_test": num_test})
        self._check_classes(self._labels[fit])
        self.data_hash = fingerprint([self.data_hash, test.tolist()])
        self._train_index, self._val_index, self._test_index = fit[self._train_index], fit[self._val_index], test

    # In one array

    def read(self, scratch: Path) -> ImageSet:
        n, size = len(self._listing.files), self._stored_size
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

    def _decode(self, out: np.ndarray | None) -> dict[int, str]:
        """Decode everything; without `out` only to see whether it can be decoded."""
        files = self._listing.files
        hint = "" if self._skip_corrupt else HINT
        failures = decode_all(files, self._decode_one, skip_corrupt=self._skip_corrupt, out=out, hint=hint)
        if failures:
            first = next(iter(failures.values()))
            log.warning(f"Skipped {len(failures)} of {len(files)} images: {first}; …")
        return failures

    def _decode_one(self, path: Path) -> np.ndarray:
        return decode(path, self.framing, self._stored_size, self._max_pixels)

    def _kept(self, failures: dict[int, str]) -> np.ndarray:
        kept = np.array([i for i in range(len(self._listing.files)) if i not in failures], np.int64)
        self._check_classes(self._listing.labels[kept[kept < self._counts[0]]])
        return kept

    def _check_classes(self, labels: np.ndarray) -> None:
        left = np.unique(labels)
        for label, name in enumerate(self._listing.class_names):
            if label not in left:
                raise UserError(f"{self._root}: the class {name} has no training image that can be decoded: add some.")

    def _image_set(self, images: np.ndarray, kept: np.ndarray, failures: dict[int, str]) -> ImageSet:
        ends = np.searchsorted(kept, np.cumsum(self._counts))
        num_fit, num_val, num_test = (int(n) for n in np.diff(ends, prepend=0))
        labels, names = self._listing.labels[kept], self._listing.class_names
        drawn = not self._counts[2]
        return ImageSet(images, labels, names, num_fit, num_test, num_val, list(failures.values()), drawn)

    # In their files

    def _build(self, part: Path) -> Content:
        files = self._listing.files
        size = common_size(files)
        self._stored_size = size if size and size <= self.resize else self.resize
        path, why = self._choose_path(whole=self._stored_size == size)
        if path == "array":
            return {**super()._build(part), "path": path, "why": why}
        failures = self._decode(None)
        kept = self._kept(failures)
        images = self._image_set(np.zeros((0, self._stored_size, self._stored_size, self.channels)), kept, failures)
        names = [str(files[i].relative_to(self._root) if self._root in files[i].parents else files[i]) for i in kept]
        (part / FILES).write_text(json.dumps(names))
        np.save(part / LABELS, images.labels)
        layout = Layout(self._stored_size, self.channels, len(kept))
        sizes = [files[i].stat().st_size for i in kept]
        return {**self._content(images, layout, fingerprint([names, sizes])), "path": path, "why": why}

    def _choose_path(self, *, whole: bool) -> tuple[str, str]:
        """array or loader, and why.

        Args:
            whole: an array would hold the pictures as they are: squares of one size, none larger than `resize`.
        Raises:
            UserError: data.path=array, and it cannot be.
        """
        gib = len(self._listing.files) * self._stored_size**2 * self.channels / 2**30
        against = ""
        if gib > self._memory_limit_gib:
            against = f"{gib:.3g} GiB of images are more than data.memory_limit_gib={self._memory_limit_gib:g}"
        elif self._pipeline is not None and not whole:
            against = f"the augmentation works on whole pictures, not on squares of {self.resize} px"
        if self.requested_path == "array" and against:
            raise UserError(f"data.path=array cannot be: {against}. Take data.path=auto.")
        if against and self.requested_path == "auto":
            return "loader", against
        return super().path_taken()

    def path_taken(self) -> tuple[str, str]:
        return self._meta["path"], self._meta["why"]

    def _image_source(self) -> Source:
        if self._meta["path"] == "array":
            return super()._image_source()
        files = [self._root / name for name in read_json(self._cache / FILES, MAX_NAMES_BYTES)]
        return InFiles(files, self.channels, self._max_pixels)
