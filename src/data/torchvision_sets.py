"""CIFAR-10, MNIST and Fashion-MNIST, by torchvision."""

import socket
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.process.errors import UserError
from lockstep.process.files import locked_file

TIMEOUT_S = 20.0


class TorchvisionDataModule(ImageDataModule):
    """A data set of torchvision.datasets. All of its test images test.

    Args:
        root: the folder of torchvision's files, where missing files are downloaded; None: a folder
            in `cache_dir`.
    """

    class_in_torchvision: str

    def __init__(self, *, root: str | Path | None = None, **options: Any) -> None:
        super().__init__(**options)
        folder = self.cache_dir / self.class_in_torchvision.lower()
        self._root = Path(root or folder).expanduser()

    def read(self) -> ImageSet:
        try:
            train, test = self._load_parts(download=False)
        except (RuntimeError, ValueError, AssertionError):
            # The files are missing or damaged.
            train, test = self._download()
        images = np.concatenate([np.asarray(part.data) for part in (train, test)])
        labels = np.concatenate([np.asarray(part.targets) for part in (train, test)])
        # Some class names are "0 - zero" and "T-shirt/top".
        names = [name.split(" - ")[0].split("/")[0].lower() for name in train.classes]
        return ImageSet(images.reshape(*images.shape[:3], -1), labels, names, num_test=len(test))

    def _load_parts(self, download: bool) -> list[Any]:
        import torchvision.datasets

        read = getattr(torchvision.datasets, self.class_in_torchvision)
        return [read(self._root, train=is_train, download=download) for is_train in (True, False)]

    def _download(self) -> list[Any]:
        """Let torchvision unpack or download the missing files, and verify them.

        Only one process does so at a time.
        """
        default_timeout = socket.getdefaulttimeout()
        try:
            with locked_file(self._root / ".lock"):
                socket.setdefaulttimeout(TIMEOUT_S)
                return self._load_parts(download=True)
        except (RuntimeError, OSError, EOFError, ValueError, AssertionError) as error:
            raise UserError(
                f"{self.class_in_torchvision} in {self._root} is missing or damaged, and could not "
                f"be downloaded ({' '.join(str(error).split())}): give data.root=FOLDER with the "
                "files as torchvision stores them. data=digits and data=synthetic need no download."
            ) from None
        finally:
            socket.setdefaulttimeout(default_timeout)


class CIFAR10DataModule(TorchvisionDataModule):
    """Colour images of 32×32 in ten classes: 50,000 to train, 10,000 to test.

    Source: https://www.cs.toronto.edu/~kriz/cifar.html
    """

    class_in_torchvision = "CIFAR10"
    own_mean = (0.4914, 0.4822, 0.4465)
    own_std = (0.2470, 0.2435, 0.2616)

    def __init__(self, *, image_size: int = 32, **options: Any) -> None:
        super().__init__(image_size=image_size, **options)


class MNISTDataModule(TorchvisionDataModule):
    """Grey images of 28×28 in ten classes: 60,000 to train, 10,000 to test.

    Source: http://yann.lecun.com/exdb/mnist/
    """

    class_in_torchvision = "MNIST"
    channels = 1
    own_mean = (0.1307,)
    own_std = (0.3081,)

    def __init__(self, *, image_size: int = 28, **options: Any) -> None:
        super().__init__(image_size=image_size, **options)


class FashionMNISTDataModule(MNISTDataModule):
    """Ten kinds of clothing. Source: https://github.com/zalandoresearch/fashion-mnist"""

    class_in_torchvision = "FashionMNIST"
    own_mean = (0.2860,)
    own_std = (0.3530,)
