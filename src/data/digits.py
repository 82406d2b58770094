"""Handwritten digits of scikit-learn, inside the package: 1,797 real images of 8×8 pixels."""

from importlib.metadata import distribution
from typing import Any

import numpy as np

from lockstep.data.image_datamodule import ImageDataModule, ImageSet


class DigitsDataModule(ImageDataModule):
    """Ten digits in grey. The last 360 images of a fixed permutation are the test set.

    Source: UCI Optical Recognition of Handwritten Digits, as in `sklearn.datasets.load_digits`.
    """

    channels = 1
    own_mean = (0.3052,)
    own_std = (0.3761,)

    def __init__(self, *, image_size: int = 8, **options: Any) -> None:
        super().__init__(image_size=image_size, **options)

    def read(self) -> ImageSet:
        # The import of load_digits would take a second.
        file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
        table = np.loadtxt(str(file), delimiter=",")
        table = table[np.random.default_rng(0).permutation(len(table))]
        pixels = np.round(table[:, :64] * (255 / 16)).astype(np.uint8)
        labels = table[:, 64].astype(np.int64)
        names = [str(digit) for digit in range(10)]
        return ImageSet(pixels.reshape(-1, 8, 8, 1), labels, names, num_test=360)
