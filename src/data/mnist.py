"""MNIST and Fashion-MNIST: 60,000 + 10,000 grey images of 28×28 in ten classes, from IDX files."""

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.download import download
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.image_set import ImageSet
from lockstep.data.node_cache import file_identity
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIZE = 28
MAX_BYTES = 2**28  # of one file, unpacked: the largest official one has 47 MB, and a gzip bomb would fill the memory


class MNISTDataModule(ImageDataModule):
    """The standard test set stays whole. Source: http://yann.lecun.com/exdb/mnist/

    Args:
        root: a folder that holds the four IDX files, as they are or with .gz. None: a known place, else download.
        download_dir: where downloaded files are kept.
        urls: folders on the net where the files are looked for, in turn.
    """

    channels = 1
    own_mean, own_std = (0.1307,), (0.3081,)
    title = "MNIST"
    class_list = tuple("0123456789")
    mirrors: tuple[str, ...] = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
    md5 = (  # of the .gz files, in the order of FILES, as torchvision has them
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    )
    known_places: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        name: str = "mnist",
        image_size: int = SIZE,
        root: str | Path | None = None,
        download_dir: str | Path = REPOSITORY / "data" / "mnist",
        urls: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(name=name, image_size=image_size, **options)
        self._root, self._download_dir, self._urls = root, Path(download_dir), urls or self.mirrors

    def identity(self) -> Any:
        self._files = self._locate()
        return [file_identity(path) for path in self._files]

    def read(self, scratch: Path) -> ImageSet:
        train, train_labels, test, test_labels = (read_idx(path) for path in self._files)
        for images, labels in ((train, train_labels), (test, test_labels)):
            if images.shape[1:] != (SIZE, SIZE) or labels.shape != images.shape[:1]:
                raise UserError(
                    f"{self._files[0].parent} is not {self.title}: images {images.shape} and labels {labels.shape} do "
                    f"not fit together as (n, {SIZE}, {SIZE}) and (n,)."
                )
        images, labels = np.concatenate([train, test])[..., None], np.concatenate([train_labels, test_labels])
        return ImageSet(images, labels, list(self.class_list), num_fit=len(train), num_test=len(test))

    def _locate(self) -> list[Path]:
        if self._root:
            files = _files_in(Path(self._root))
            if files is None:
                raise UserError(
                    f"data.root={self._root} must be a folder with {', '.join(FILES)} (or the same with .gz)."
                )
            return files
        for place in self.known_places:
            if files := _files_in(Path(place)):
                return files
        return [self._fetch(name, md5) for name, md5 in zip(FILES, self.md5, strict=True)]

    def _fetch(self, name: str, md5: str) -> Path:
        urls = [f"{folder.rstrip('/')}/{name}.gz" for folder in self._urls]
        return download(urls, self._download_dir / f"{name}.gz", md5=md5)


class FashionMNISTDataModule(MNISTDataModule):
    """Ten kinds of clothing. Source: https://github.com/zalandoresearch/fashion-mnist"""

    own_mean, own_std = (0.2860,), (0.3530,)
    title = "Fashion-MNIST"
    class_list = (
        "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    )  # fmt: skip
    mirrors = ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",)
    md5 = (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    )
    known_places = ("/usr/share/datasets/fashion-mnist",)  # Debian's package dataset-fashion-mnist

    def __init__(
        self,
        *,
        name: str = "fashion_mnist",
        download_dir: str | Path = REPOSITORY / "data" / "fashion_mnist",
        **options: Any,
    ) -> None:
        super().__init__(name=name, download_dir=download_dir, **options)


def _files_in(root: Path) -> list[Path] | None:
    """The four files, where `root` or the raw/ below it (torchvision's layout) has them all."""
    for folder in (root, root / "raw", root / "MNIST" / "raw", root / "FashionMNIST" / "raw"):
        found = [next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None) for name in FILES]
        if all(found):
            return [path for path in found if path]
    return None


def read_idx(path: Path) -> np.ndarray:
    """An IDX file of unsigned bytes, gzipped or not; format: http://yann.lecun.com/exdb/mnist/

    Raises:
        UserError: truncated, or not one.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is truncated or no gzip file ({error}): delete it and fetch it again.") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"{path} holds more than {MAX_BYTES} bytes: it is not an official file.")
    dimensions = data[3] if len(data) >= 4 else 0
    head = 4 + 4 * dimensions
    if data[:3] != b"\x00\x00\x08" or len(data) < head:
        raise UserError(f"{path} is not an IDX file of unsigned bytes: delete it and fetch it again.")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dimensions, 4))
    if len(data) - head != math.prod(shape) or 0 in shape:  # with a zero the others could be anything
        raise UserError(f"{path} holds {len(data) - head} bytes instead of {shape}: delete it and fetch it again.")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)
