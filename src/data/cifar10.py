"""CIFAR-10: 50,000 + 10,000 colour images of 32×32 in ten classes, from the official files or folders of images."""

import io
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.array_pickle import load_arrays
from lockstep.data.download import download
from lockstep.data.framing import Framing
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.image_set import ImageSet
from lockstep.data.image_tree import decode, decode_all, list_split, natural_key
from lockstep.data.node_cache import file_identity
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import REPOSITORY

ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
MD5 = "c58f30108f718f92721af3b95e74349a"  # of the archive, as torchvision has it
URLS = ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",)
TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
CLASS_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
SIZE = 32
MAX_BYTES = 2**26  # of one batch file, unpacked: an official one has 31 MB
CHOICES = f"{FOLDER}, {ARCHIVE}, or train/<class>/*.jpg and test/<class>/*.jpg"


class CIFAR10DataModule(ImageDataModule):
    """The standard test set stays whole; images are ordered by file name, so that every layout trains alike.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html

    Args:
        root: what is there already: a folder that holds cifar-10-batches-py, cifar-10-python.tar.gz, or
            train/<class>/*.jpg and test/<class>/*.jpg, or one of the first two itself. None: download.
        download_dir: where the archive is kept.
        urls: where the archive is looked for, in turn.
    """

    own_mean, own_std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(
        self,
        *,
        name: str = "cifar10",
        image_size: int = SIZE,
        root: str | Path | None = None,
        download_dir: str | Path = REPOSITORY / "data" / "cifar10",
        urls: Sequence[str] = URLS,
        **options: Any,
    ) -> None:
        super().__init__(name=name, image_size=image_size, **options)
        self._root, self._download_dir, self._urls = root, Path(download_dir), urls

    def identity(self) -> Any:
        self._source = _locate(Path(self._root)) if self._root else self._fetch()
        if self._source.is_file():
            return file_identity(self._source)
        if self._source.name == FOLDER:
            return [file_identity(path) for path in sorted(self._source.iterdir()) if path.is_file()]
        return [file_identity(path) for part in ("train", "test") for path in list_split(self._source / part).files]

    def read(self, scratch: Path) -> ImageSet:
        if self._source.is_file():
            return _from_batches(_read_archive(self._source))
        if self._source.name == FOLDER:
            return _from_batches(_read_folder(self._source))
        return _from_tree(self._source)

    def _fetch(self) -> Path:
        return download(self._urls, self._download_dir / ARCHIVE, md5=MD5)


Batches = dict[str, Any]  # what the official batch files hold, by file name


def _locate(root: Path) -> Path:
    """The archive, the folder of batches, or the folder with train/ and test/."""
    if root.is_file() or (root.is_dir() and root.name == FOLDER):
        return root
    if not root.is_dir():
        raise UserError(f"data.root={root} does not exist: give a folder that holds {CHOICES}.")
    for name in (FOLDER, ARCHIVE):
        if (root / name).exists():
            return root / name
    if (root / "train").is_dir() and (root / "test").is_dir():
        return root
    raise UserError(f"data.root={root} does not hold CIFAR-10: give a folder that holds {CHOICES}.")


def _read_folder(folder: Path) -> Batches:
    content = {}
    for name in (*TRAIN_FILES, "test_batch"):
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing: CIFAR-10 has {', '.join(TRAIN_FILES)} and test_batch.")
        with (folder / name).open("rb") as file:
            content[name] = load_arrays(file, str(folder / name))
    return content


def _read_archive(path: Path) -> Batches:
    content = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = Path(member.name).name
                if name not in (*TRAIN_FILES, "test_batch") or not member.isfile():
                    continue
                if member.size > MAX_BYTES:
                    raise UserError(f"{path}:{name} has {member.size} bytes: it is not the official archive.")
                if file := archive.extractfile(member):
                    content[name] = load_arrays(io.BytesIO(file.read()), f"{path}:{name}")
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path} is truncated or no tar.gz file ({error}): delete it and fetch it again.") from None
    missing = [name for name in (*TRAIN_FILES, "test_batch") if name not in content]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: it is not the official CIFAR-10 archive.")
    return content


def _from_batches(content: Batches) -> ImageSet:
    parts = []
    for names in (TRAIN_FILES, ("test_batch",)):
        read = [_batch(content[name], name) for name in names]
        images, labels = np.concatenate([r[0] for r in read]), np.concatenate([r[1] for r in read])
        files = [name for r in read for name in r[2]]
        order = _canonical_order(files, labels) if len(files) == len(labels) else slice(None)
        parts.append((images[order], labels[order]))
    return _image_set(parts)


def _batch(content: Any, name: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images (n, 32, 32, 3), labels (n,) and file names without their ending."""
    try:
        content = {_text(key): value for key, value in content.items()}
        rows, labels = content["data"], np.asarray(content["labels"], np.int64)
        complete = rows.dtype == np.uint8 and rows.shape == (len(labels), 3 * SIZE * SIZE)
        files = [Path(_text(file)).stem for file in content.get("filenames", [])]
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError):
        complete = False
    if not complete:
        raise UserError(f"{name} is not a CIFAR-10 file: it must hold data (n, 3072) uint8 and n labels.")
    return rows.reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1), labels, files


def _text(value: str | bytes) -> str:
    """A string of Python 3, or of Python 2, which comes as bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _from_tree(root: Path) -> ImageSet:
    parts = []
    for split in ("train", "test"):
        listing = list_split(root / split)
        if listing.class_names != CLASS_NAMES:
            raise UserError(
                f"{root / split} has the classes {', '.join(listing.class_names[:12])}, not CIFAR-10's "
                f"{', '.join(CLASS_NAMES)}: use data=image_folder for images of your own."
            )
        order = _canonical_order([file.stem for file in listing.files], listing.labels)
        files = listing.files
        parts.append((_decoded([files[i] for i in order]), listing.labels[order]))
    return _image_set(parts)


def _decoded(files: list[Path]) -> np.ndarray:
    images, framing = np.zeros((len(files), SIZE, SIZE, 3), np.uint8), Framing(SIZE, SIZE, "squash")
    decode_all(len(files), lambda i: decode(files[i], framing), out=images)
    return images


def _canonical_order(names: list[str], labels: np.ndarray) -> list[int]:
    """By file name, which all layouts have in common, so that the same seed draws the same images from each."""
    return sorted(range(len(names)), key=lambda i: (natural_key(names[i]), labels[i]))


def _image_set(parts: list[tuple[np.ndarray, np.ndarray]]) -> ImageSet:
    (train, train_labels), (test, test_labels) = parts
    images, labels = np.concatenate([train, test]), np.concatenate([train_labels, test_labels])
    return ImageSet(images, labels, CLASS_NAMES, num_fit=len(train), num_test=len(test))
