"""Generated images without a download: a smooth pattern per class plus noise."""

from typing import Any

import numpy as np

from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.process.errors import UserError


class SyntheticDataModule(ImageDataModule):
    """Generated images; the same arguments give the same pixels on every machine, whatever `seed` is."""

    own_mean, own_std = (0.5,), (0.18,)

    def __init__(
        self, *, image_size: int = 32, num_images: int = 4000, num_test_images: int = 1000, num_classes: int = 10,
        channels: int = 3, stored_size: int | None = None, noise: float = 1.0, **options: Any,
    ) -> None:  # fmt: skip
        for key, value, least in (("num_images", num_images, 2), ("num_classes", num_classes, 2)):
            if value < least:
                raise UserError(f"data.{key}={value} must be at least {least}.")
        self.channels = channels
        super().__init__(image_size=image_size, **options)
        self._counts, self._noise = (num_images, num_test_images), noise
        self._num_patterns, self._stored_size = num_classes, stored_size

    def read(self) -> ImageSet:
        generator = np.random.default_rng(0)
        n, size = sum(self._counts), self._stored_size or self.resize
        # A smooth pattern for each class, (classes, size, size, channels) of unit variance: sums of a few waves.
        waves = np.cos(np.arange(4)[:, None] * (np.arange(size) + 0.5) / size * np.pi).astype(np.float32)
        weights = generator.standard_normal((self._num_patterns, self.channels, 4, 4)).astype(np.float32)
        weights[:, :, 0, 0] = 0  # no mean brightness, which would reveal the class
        patterns = np.einsum("kcij,iy,jx->kyxc", weights, waves, waves)
        patterns /= np.maximum(patterns.std(axis=(1, 2, 3), keepdims=True), 1e-6)
        labels = generator.permutation(np.arange(n) % self._num_patterns)
        images = np.empty((n, size, size, self.channels), np.uint8)
        for start in range(0, n, 256):
            some = labels[start : start + 256]
            noise = generator.standard_normal((len(some), size, size, self.channels), np.float32)
            values = 128 + 32 * (patterns[some] + self._noise * noise)
            images[start : start + 256] = values.clip(0, 255)
        names = [f"pattern {c}" for c in range(self._num_patterns)]
        return ImageSet(images, labels, names, num_test=self._counts[1])
