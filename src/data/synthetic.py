"""Generated images without a download: a smooth pattern per class plus noise."""

from typing import Any

import numpy as np

from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.process.errors import UserError

WAVES = 4  # along each side
CHUNK = 256  # images that are made at a time


class SyntheticDataModule(ImageDataModule):
    """Generated images.

    The same arguments give the same pixels on every machine and with every `seed`.
    """

    own_mean = (0.5,)
    own_std = (0.18,)

    def __init__(
        self,
        *,
        image_size: int = 32,
        num_images: int = 4000,
        num_test_images: int = 1000,
        num_classes: int = 10,
        channels: int = 3,
        stored_size: int | None = None,
        noise: float = 1.0,
        **options: Any,
    ) -> None:
        for key, value in (("num_images", num_images), ("num_classes", num_classes)):
            if value < 2:
                raise UserError(f"data.{key}={value} must be at least 2.")
        self.channels = channels
        super().__init__(image_size=image_size, **options)
        self._count = num_images + num_test_images
        self._num_test = num_test_images
        self._num_patterns = num_classes
        self._stored_size = stored_size
        self._noise = noise

    def read(self) -> ImageSet:
        generator = np.random.default_rng(0)
        size = self._stored_size or self.framing.resize
        patterns = self._make_patterns(generator, size)
        labels = generator.permutation(np.arange(self._count) % self._num_patterns)
        images = np.empty((self._count, size, size, self.channels), np.uint8)
        for start in range(0, self._count, CHUNK):
            chunk = slice(start, start + CHUNK)
            shape = images[chunk].shape
            noise = generator.standard_normal(shape, np.float32)
            values = 128 + 32 * (patterns[labels[chunk]] + self._noise * noise)
            images[chunk] = values.clip(0, 255)
        names = [f"pattern {number}" for number in range(self._num_patterns)]
        return ImageSet(images, labels, names, num_test=self._num_test)

    def _make_patterns(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Return a smooth pattern for each class, (classes, size, size, channels) of unit variance.

        A pattern is a sum of a few waves.
        """
        frequencies = np.arange(WAVES)[:, None]
        waves = np.cos(frequencies * (np.arange(size) + 0.5) / size * np.pi).astype(np.float32)
        shape = (self._num_patterns, self.channels, WAVES, WAVES)
        weights = generator.standard_normal(shape).astype(np.float32)
        # The mean brightness is 0, because it would reveal the class.
        weights[:, :, 0, 0] = 0
        patterns = np.einsum("kcij,iy,jx->kyxc", weights, waves, waves)
        return patterns / np.maximum(patterns.std(axis=(1, 2, 3), keepdims=True), 1e-6)
