"""CIFAR-10: 50,000 + 10,000 colour images of 32×32 in ten classes, by torchvision."""

import pickle
import socket
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.data.listing import natural_key
from lockstep.data.node_cache import file_identity
from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file
from lockstep.runs.provenance import REPOSITORY

FOLDER, ARCHIVE, TIMEOUT_S = "cifar-10-batches-py", "cifar-10-python.tar.gz", 20.0


class CIFAR10DataModule(ImageDataModule):
    """The standard test set stays whole. Source: https://www.cs.toronto.edu/~kriz/cifar.html

    `root` holds cifar-10-batches-py or cifar-10-python.tar.gz, or is one of the two; None: download to `download_dir`.
    """

    own_mean, own_std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def __init__(
        self, *, image_size: int = 32, root: str | Path | None = None,
        download_dir: str | Path = REPOSITORY / "data" / "cifar10", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(image_size=image_size, **options)
        self._root, self._folder = root, Path(root or download_dir).expanduser()
        if root and self._folder.name in (FOLDER, ARCHIVE):
            self._folder = self._folder.parent

    def identity(self) -> Any:
        from torchvision.datasets import CIFAR10

        if self._root and not any((self._folder / name).exists() for name in (FOLDER, ARCHIVE)):
            raise UserError(f"data.root={self._root} must be a folder that holds {FOLDER} or {ARCHIVE}.")
        if not self._root or not (self._folder / FOLDER).exists():
            downloaded(CIFAR10, self._folder)
        return [file_identity(path) for path in sorted((self._folder / FOLDER).iterdir()) if path.is_file()]

    def read(self) -> ImageSet:
        from torchvision.datasets import CIFAR10

        folder = self._folder / FOLDER
        try:
            parts = CIFAR10(self._folder, train=True), CIFAR10(self._folder, train=False)  # compares checksums
        except RuntimeError:
            raise UserError(f"{folder} is not the official CIFAR-10, or damaged: fetch it again.") from None
        images, labels = [], []
        for part, files in zip(parts, (CIFAR10.train_list, CIFAR10.test_list), strict=True):
            batches = [pickle.loads((folder / file).read_bytes(), encoding="latin1") for file, _ in files]
            names = [natural_key(name) for batch in batches for name in batch["filenames"]]
            order = sorted(range(len(part)), key=lambda i: (names[i], part.targets[i]))
            images.append(part.data[order])
            labels.append(np.array(part.targets, np.int64)[order])
        return ImageSet(np.concatenate(images), np.concatenate(labels), parts[0].classes, num_test=len(parts[1]))


def downloaded(source: Any, folder: Path) -> None:
    """Let torchvision verify the files of a data set, and unpack or download what is missing; one process at a time."""
    before = socket.getdefaulttimeout()
    try:
        with locked_file(folder / ".lock"):
            socket.setdefaulttimeout(TIMEOUT_S)
            source(folder, download=True)
    except (RuntimeError, OSError, EOFError) as error:
        raise UserError(
            f"{source.__name__} could not be downloaded into {folder} ({' '.join(str(error).split())}): put it there "
            "yourself, or give data.root=FOLDER with the data. data=digits and data=synthetic need no download."
        ) from None
    finally:
        socket.setdefaulttimeout(before)
