"""Handwritten digits of scikit-learn: 1,797 real images of 8×8 pixels inside the package, so no download."""

from typing import Any

import numpy as np

from lockstep.data.image_datamodule import ImageDataModule, ImageSet


class DigitsDataModule(ImageDataModule):
    """Ten digits in grey; the last 360 of one fixed permutation are the test set.

    Source: UCI Optical Recognition of Handwritten Digits, as in `sklearn.datasets.load_digits`.
    """

    channels = 1
    own_mean, own_std = (0.3052,), (0.3761,)

    def __init__(self, *, image_size: int = 8, **options: Any) -> None:
        super().__init__(image_size=image_size, **options)

    def identity(self) -> str:
        return "sklearn digits"

    def read(self) -> ImageSet:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        images = np.round(digits.images * (255 / 16)).astype(np.uint8)[order, :, :, None]
        return ImageSet(images, digits.target[order], [str(name) for name in digits.target_names], num_test=360)
