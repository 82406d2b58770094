"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images of 28×28 in ten classes, by torchvision."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from data.cifar10 import downloaded
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.image_set import ImageSet
from lockstep.data.node_cache import file_identity
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class MNISTDataModule(ImageDataModule):
    """The standard test set stays whole. Source: http://yann.lecun.com/exdb/mnist/

    Args:
        root: a folder that holds the four IDX files, plain or gzipped, or torchvision's MNIST/raw; None: a known place,
            else download.
        download_dir: where downloaded files are kept.
    """

    channels = 1
    own_mean, own_std = (0.1307,), (0.3081,)
    source = "MNIST"  # of torchvision.datasets
    known_places: tuple[str, ...] = ()

    def __init__(
        self, *, name: str = "mnist", image_size: int = 28, root: str | Path | None = None, download_dir: str | Path =
        REPOSITORY / "data" / "mnist", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name, image_size=image_size, **options)
        self._root, self._download_dir = root, Path(download_dir)

    def identity(self) -> Any:
        self._files = self._locate()
        return [file_identity(path) for path in self._files]

    def read(self) -> ImageSet:
        train, train_labels, test, test_labels = (read_idx(path) for path in self._files)
        try:
            images = np.concatenate([train, test]).reshape(-1, 28, 28, 1)
            labels = np.concatenate([train_labels, test_labels]).reshape(len(images))
        except ValueError as error:
            raise UserError(f"{self._files[0].parent} is not {self.source}: its files do not fit ({error}).") from None
        names = [name.split(" - ")[0].split("/")[0].lower() for name in self._dataset().classes]
        return ImageSet(images, labels, names, num_test=len(test))

    def _dataset(self) -> Any:
        import torchvision.datasets

        return getattr(torchvision.datasets, self.source)

    def _locate(self) -> list[Path]:
        places: tuple[str | Path, ...] = (self._root,) if self._root else (*self.known_places, self._download_dir)
        for place in places:
            if files := _files_in(Path(place).expanduser()):
                return files
        if self._root:
            raise UserError(f"data.root={self._root} must be a folder with {', '.join(FILES)} (or the same with .gz).")
        downloaded(self._dataset(), self._download_dir)
        return _files_in(self._download_dir) or []


class FashionMNISTDataModule(MNISTDataModule):
    """Ten kinds of clothing. Source: https://github.com/zalandoresearch/fashion-mnist"""

    own_mean, own_std = (0.2860,), (0.3530,)
    source = "FashionMNIST"
    known_places = ("/usr/share/datasets/fashion-mnist",)  # Debian's package dataset-fashion-mnist

    def __init__(
        self, *, name: str = "fashion_mnist", download_dir: str | Path = REPOSITORY / "data" / "fashion_mnist",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name, download_dir=download_dir, **options)


def _files_in(root: Path) -> list[Path] | None:
    """The four files, if `root` or torchvision's raw/ below it has them all."""
    for folder in (root, root / "raw", root / "MNIST" / "raw", root / "FashionMNIST" / "raw"):
        found = [next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None) for name in FILES]
        if all(found):
            return [path for path in found if path]
    return None


def read_idx(path: Path) -> np.ndarray:
    """Return an IDX file of unsigned bytes, gzipped or not; format: http://yann.lecun.com/exdb/mnist/

    Raises:
        UserError: truncated, or not one.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        shape = np.frombuffer(data, ">u4", data[3], 4)
        if data[:3] != b"\x00\x00\x08":
            raise ValueError("it does not begin as an IDX file of bytes")
        return np.frombuffer(data, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise UserError(f"{path} is truncated or no IDX file ({error}): delete it and fetch it again.") from None
