"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images of 28×28 in ten classes, by torchvision."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from data.cifar10 import downloaded
from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.data.node_cache import file_identity
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class MNISTDataModule(ImageDataModule):
    """The standard test set stays whole. Source: http://yann.lecun.com/exdb/mnist/

    `root` holds the four IDX files, plain or gzipped, or torchvision's MNIST/raw; None: a known place, else download.
    """

    channels = 1
    own_mean, own_std = (0.1307,), (0.3081,)
    source, default_name = "MNIST", "mnist"  # in torchvision.datasets, and here
    known_places: tuple[str, ...] = ()

    def __init__(
        self, *, name: str | None = None, image_size: int = 28, root: str | Path | None = None,
        download_dir: str | Path | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name or self.default_name, image_size=image_size, **options)
        self._root, self._download_dir = root, Path(download_dir or REPOSITORY / "data" / self.default_name)

    def identity(self) -> Any:
        import torchvision.datasets

        source = getattr(torchvision.datasets, self.source)
        self._class_names = [name.split(" - ")[0].split("/")[0].lower() for name in source.classes]
        if not (files := self._find()) and self._root:
            raise UserError(f"data.root={self._root} must be a folder with {', '.join(FILES)} (or the same with .gz).")
        if not files:
            downloaded(source, self._download_dir)
        self._files = files or self._find()
        return [file_identity(path) for path in self._files]

    def _find(self) -> list[Path]:
        places = (self._root,) if self._root else (*self.known_places, self._download_dir)
        for place in map(str, places):
            for inner in ("", "raw", f"{self.source}/raw"):
                for suffix in ("", ".gz"):
                    files = [Path(place, inner, f"{name}{suffix}").expanduser() for name in FILES]
                    if all(path.is_file() for path in files):
                        return files
        return []

    def read(self) -> ImageSet:
        train, train_labels, test, test_labels = map(read_idx, self._files)
        images, labels = np.concatenate([train, test])[..., None], np.concatenate([train_labels, test_labels])
        return ImageSet(images, labels, self._class_names, num_test=len(test))


class FashionMNISTDataModule(MNISTDataModule):
    """Ten kinds of clothing. Source: https://github.com/zalandoresearch/fashion-mnist"""

    own_mean, own_std = (0.2860,), (0.3530,)
    source, default_name = "FashionMNIST", "fashion_mnist"
    known_places = ("/usr/share/datasets/fashion-mnist",)  # Debian's package dataset-fashion-mnist


def read_idx(path: Path) -> np.ndarray:
    """Return an IDX file of unsigned bytes, gzipped (which torchvision does not read) or not."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        shape = np.frombuffer(data, ">u4", data[3], 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise UserError(f"{path} is truncated or no IDX file ({error}): delete it and fetch it again.") from None
