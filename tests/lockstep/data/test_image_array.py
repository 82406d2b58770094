"""The strided gather against cutting, padding and mirroring image by image."""

import numpy as np
import pytest
import torch

from lockstep.data.image_array import ImageArray, Layout, mirror_some, mirrored, write_images

IMAGES = np.random.default_rng(0).integers(1, 256, (7, 6, 6, 3), dtype=np.uint8)


def array(padding, mirrored, window, images=IMAGES):
    layout = Layout(images.shape[1], images.shape[3], len(images), padding, mirrored)
    flat = np.zeros(layout.num_bytes, np.uint8)
    write_images(flat, images, layout)
    return ImageArray(torch.from_numpy(flat), layout, window)


def expected(index, draws, padding, window, images=IMAGES):
    """Pad, crop, then flip, one image at a time."""
    padded = np.pad(images, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    crops = [padded[i, y : y + window, x : x + window] for i, y, x in zip(index, draws[0], draws[1])]
    return np.stack([crop[:, ::-1] if flip else crop for crop, flip in zip(crops, draws[2])])


def every_draw(padding, window, n):
    starts = range(6 + 2 * padding - window + 1)
    return np.array([(i, y, x, f) for i in range(n) for y in starts for x in starts for f in (0, 1)]).T


@pytest.mark.parametrize(("padding", "window"), [(0, 6), (2, 6), (0, 4), (1, 5), (3, 4)])
@pytest.mark.parametrize("mirrored", [0, 7])
def test_every_window_of_every_image(padding, window, mirrored):
    index, *draws = every_draw(padding, window, 7)
    cut = array(padding, mirrored, window).windows(torch.tensor(index), torch.tensor(np.array(draws)))
    assert np.array_equal(cut.numpy(), expected(index, draws, padding, window))


def test_only_the_first_images_need_a_mirrored_copy():
    index, *draws = every_draw(2, 6, 4)
    cut = array(2, 4, 6).windows(torch.tensor(index), torch.tensor(np.array(draws)))
    assert np.array_equal(cut.numpy(), expected(index, draws, 2, 6))
    last = array(2, 4, 6).windows(torch.tensor([6]), torch.tensor([[2], [2], [0]]))
    assert np.array_equal(last[0].numpy(), IMAGES[6])


def test_a_copy_that_reads_no_number_is_mirrored_alike():
    images, flip = torch.from_numpy(IMAGES.copy()), torch.tensor([0, 1, 1, 0, 1, 0, 0])
    copied = mirrored(images, flip)
    mirror_some(images, flip)
    assert torch.equal(copied, images) and not np.array_equal(images.numpy(), IMAGES)


@pytest.mark.parametrize("padding", [0, 2])
def test_a_batch_becomes_an_array_of_its_own(padding):
    index, *draws = every_draw(padding, 5, 7)
    own = ImageArray.of_batch(torch.from_numpy(IMAGES), padding, 5)
    cut = own.windows(torch.tensor(index), torch.tensor(np.array(draws)))
    assert np.array_equal(cut.numpy(), expected(index, draws, padding, 5))


def test_grey_images_and_a_file(tmp_path):
    grey = IMAGES[..., :1]
    written = array(1, 7, 6, grey)
    written.flat.numpy().tofile(tmp_path / "images.bin")
    opened = ImageArray.open(tmp_path / "images.bin", written.layout, 6)
    draws = torch.tensor([[0, 2], [1, 0], [1, 0]])
    cut = opened.windows(torch.tensor([3, 5]), draws)
    assert np.array_equal(cut.numpy(), expected([3, 5], draws.numpy(), 1, 6, grey))


def test_borders_are_shared_between_rows_and_images():
    layout = Layout(32, 3, 1000, padding=4, num_mirrored=1000)
    assert layout.num_bytes == (2000 * 36 * 36 + 4 * 36 + 4) * 3
