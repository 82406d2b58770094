"""CIFAR-10: 50,000 + 10,000 colour images of 32×32 in ten classes, by torchvision or from folders of images."""

import pickle
import socket
from pathlib import Path
from typing import Any

import numpy as np

from data.image_folder import list_folder
from lockstep.data.decoding import decode, decode_all
from lockstep.data.framing import Framing
from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.data.listing import TEST, TRAIN, natural_key
from lockstep.data.node_cache import file_identity
from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file
from lockstep.runs.provenance import REPOSITORY

ARCHIVE, FOLDER = "cifar-10-python.tar.gz", "cifar-10-batches-py"
CLASS_NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CHOICES = f"{FOLDER}, {ARCHIVE}, or train/<class>/*.jpg and test/<class>/*.jpg"
TIMEOUT_S = 20.0


class CIFAR10DataModule(ImageDataModule):
    """The standard test set stays whole. Images are ordered by file name, so that every layout trains alike.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html

    Args:
        root: a folder that holds cifar-10-batches-py, cifar-10-python.tar.gz, or train/<class>/*.jpg and
            test/<class>/*.jpg; or one of the first two itself. None: download.
        download_dir: where downloaded and extracted files are kept.
    """

    own_mean, own_std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(
        self, *, name: str = "cifar10", image_size: int = 32, root: str | Path | None = None, download_dir: str | Path
        = REPOSITORY / "data" / "cifar10", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(name=name, image_size=image_size, **options)
        self._root, self._download_dir = Path(root).expanduser() if root else None, Path(download_dir)

    def identity(self) -> Any:
        self._source = self._locate()
        if self._source.name == FOLDER:
            return [file_identity(path) for path in sorted(self._source.iterdir()) if path.is_file()]
        return list_folder(self._source).identity

    def read(self) -> ImageSet:
        parts = _from_batches(self._source) if self._source.name == FOLDER else _from_tree(self._source)
        images, labels = (np.concatenate([part[i] for part in parts]) for i in range(2))
        return ImageSet(images, labels, CLASS_NAMES, num_test=len(parts[1][0]))

    def _locate(self) -> Path:
        """Return the folder of batches, or the folder with train/ and test/."""
        from torchvision.datasets import CIFAR10
        from torchvision.datasets.utils import check_integrity, extract_archive

        root = self._root
        if root is None:
            downloaded(CIFAR10, self._download_dir)
            return self._download_dir / FOLDER
        if not root.exists():
            raise UserError(f"data.root={root} does not exist: give a folder that holds {CHOICES}.")
        archive = root if root.is_file() else root / ARCHIVE
        for folder in (root if root.name == FOLDER else root / FOLDER, root):
            if folder.name == FOLDER and folder.is_dir() or (folder / "train").is_dir() and (folder / "test").is_dir():
                return folder
        if not archive.is_file():
            raise UserError(f"data.root={root} does not hold CIFAR-10: give a folder that holds {CHOICES}.")
        if not check_integrity(archive, CIFAR10.tgz_md5):
            raise UserError(f"{archive} is not the official archive, or damaged: delete it and fetch it again.")
        with locked_file(self._download_dir / ".lock"):
            if not (self._download_dir / FOLDER / "batches.meta").is_file():
                extract_archive(archive, self._download_dir)
        return self._download_dir / FOLDER


def downloaded(source: Any, folder: Path) -> None:
    """Download a data set of torchvision, which verifies its checksum; one process per node does it, others wait.

    Raises:
        UserError: it cannot be fetched; says what works offline.
    """
    before = socket.getdefaulttimeout()
    with locked_file(folder / ".lock"):
        socket.setdefaulttimeout(TIMEOUT_S)
        try:
            source(folder, download=True)
        except (RuntimeError, OSError, EOFError) as error:
            raise UserError(
                f"{source.__name__} could not be downloaded ({' '.join(str(error).split())}): put it into {folder} "
                "yourself, give data.root=FOLDER with the data, or work offline: data=digits and data=synthetic need "
                "no download."
            ) from None
        finally:
            socket.setdefaulttimeout(before)


def _from_batches(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    from torchvision.datasets import CIFAR10

    parts = []
    for train, names in ((True, CIFAR10.train_list), (False, CIFAR10.test_list)):
        try:
            batches = CIFAR10(folder.parent, train=train)  # compares the files with their checksums
        except (RuntimeError, OSError) as error:
            raise UserError(f"{folder} is not the official CIFAR-10, or damaged ({error}): fetch it again.") from None
        files: list[str] = []
        for name, _ in names:
            with (folder / name).open("rb") as file:
                files += pickle.load(file, encoding="latin1").get("filenames", [])
        labels = np.array(batches.targets, np.int64)
        order = _canonical_order([Path(file).stem for file in files], labels) if files else slice(None)
        parts.append((batches.data[order], labels[order]))
    return parts


def _from_tree(root: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    listed = list_folder(root)
    if listed.class_names != CLASS_NAMES:
        raise UserError(
            f"{root} has the classes {', '.join(listed.class_names[:12])}, not CIFAR-10's {', '.join(CLASS_NAMES)}: "
            "give data=image_folder for images of your own."
        )
    framing, parts = Framing(32, 32, "squash"), []
    for split in (TRAIN, TEST):
        index = np.flatnonzero(listed.splits == split)
        labels = listed.targets[index]
        paths = [Path(listed.path(i)) for i in index.tolist()]
        order = _canonical_order([path.stem for path in paths], labels)
        images = np.zeros((len(index), 32, 32, 3), np.uint8)
        decode_all(len(index), lambda i: decode(paths[order[i]], framing), images)  # noqa: B023
        parts.append((images, labels[order]))
    return parts


def _canonical_order(names: list[str], labels: np.ndarray) -> list[int]:
    """Sort by file name, which all layouts have in common, so that the same seed draws the same images from each."""
    return sorted(range(len(names)), key=lambda i: (natural_key(names[i]), labels[i]))
