"""Made-up images: the same everywhere, balanced, and learnable but not trivially so."""

import numpy as np

from data.synthetic import SyntheticDataModule


def read(**options):
    return SyntheticDataModule(num_images=500, num_test_images=203, **options).read()


def test_the_same_numbers_give_the_same_pixels_whatever_the_seed():
    assert np.array_equal(read(seed=0).images, read(seed=9).images)
    assert not np.array_equal(read().images, read(noise=2.0).images)


def test_classes_are_balanced_and_sizes_as_asked():
    images = read(num_classes=3, channels=1, image_size=20, resize=24)
    assert images.images.shape == (703, 24, 24, 1) and images.images.dtype == np.uint8
    assert sorted(np.bincount(images.labels)) == [234, 234, 235]
    assert read(image_size=64, resize=70, stored_size=32).images.shape[1] == 32


def test_the_nearest_class_mean_finds_the_class_and_brightness_does_not():
    images = read(noise=1.0)
    pixels, labels = images.images.reshape(703, -1).astype(np.float64), images.labels
    means = np.stack([pixels[:500][labels[:500] == c].mean(0) for c in range(10)])
    nearest = ((pixels[500:, None] - means) ** 2).sum(-1).argmin(1)
    assert (nearest == labels[500:]).mean() > 0.95
    brightness = pixels.mean(1)
    by_brightness = np.abs(
        brightness[500:, None] - np.stack([brightness[:500][labels[:500] == c].mean() for c in range(10)])
    )
    assert (by_brightness.argmin(1) == labels[500:]).mean() < 0.6
