"""The base of all augmentations: options, order of operations, the stream of one image; pairs that are mixed."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lockstep.data.augmentation import CropFlip, own_stream
from lockstep.data.framing import Framing
from lockstep.data.mixing import Mixing, check_pairs, mix
from lockstep.runs.errors import UserError

FRAMING = Framing(12, 14, crop_padding=2, flip=True, mean=(0.5, 0.25, 0.75))
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 40, 3), dtype=np.uint8))


def pixels(operation, seed, image=IMAGE):
    with own_stream(seed):
        return np.asarray(operation(image))


def test_crop_and_flip_then_jitter_then_erasing_are_torchvisions():
    ours = CropFlip(color_jitter=[0.4, 0.3, 0.2, 0.1], erasing_prob=0.7).pipeline(FRAMING)
    theirs = v2.Compose([
        v2.Resize(14), v2.CenterCrop(14), v2.RandomCrop(12, padding=2), v2.RandomHorizontalFlip(),
        v2.ColorJitter(0.4, 0.3, 0.2, 0.1), v2.RandomErasing(0.7, value=[128, 64, 191]),
    ])  # fmt: skip
    found = [pixels(ours, seed) for seed in range(20)]
    assert all(np.array_equal(image, pixels(theirs, seed)) for seed, image in enumerate(found))
    assert len({image.tobytes() for image in found}) == 20
    assert any((image == [128, 64, 191]).all(-1).sum() > 2 for image in found)


def test_only_what_the_device_can_do_is_done_on_whole_batches():
    assert CropFlip().on_whole_batches and CropFlip(random_crop=False, mixup_alpha=1.0).on_whole_batches
    assert not CropFlip(erasing_prob=0.1).on_whole_batches and not CropFlip(color_jitter=[0.1]).on_whole_batches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"erasing_prob": 1.1}, "erasing_prob=1.1: .* in the interval .0.0, 1.0..$"),
        ({"mixup_alpha": -1}, "augmentation.mixup_alpha=-1 and cutmix_alpha=0.0 must be from 0"),
        ({"color_jitter": [1] * 5}, r"color_jitter=\[1, 1, 1, 1, 1\] .*takes from 1 to 5 positional arguments"),
        ({"color_jitter": [0, 0, 0, 0.6]}, "hue values should be between"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(UserError, match=message):
        CropFlip(**options).pipeline(FRAMING)


def test_images_that_are_neither_grey_nor_colour():
    with pytest.raises(UserError, match="these have 5 channels: take augmentation=crop_flip"):
        CropFlip(erasing_prob=0.1).pipeline(Framing(8, 8, channels=5, mean=(0.5,) * 5))


IMAGES = torch.rand((4, 3, 8, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([2, 0, 1, 1])
NOT_MIXED = [1, 1, 0, 0, 0, 0]


def drawn(*pairs):
    return torch.tensor(pairs, dtype=torch.float64).T


def test_mixup_blends_neighbours_and_their_labels():
    images, targets = mix(IMAGES, LABELS, drawn([0.7, 0.7, 0, 0, 0, 0], NOT_MIXED), 3)
    assert torch.allclose(images[0], 0.7 * IMAGES[0] + 0.3 * IMAGES[1])
    assert torch.allclose(images[1], 0.7 * IMAGES[1] + 0.3 * IMAGES[0])
    assert torch.equal(images[2:], IMAGES[2:])
    expected = torch.tensor([[0.3, 0, 0.7], [0.7, 0, 0.3], [0, 1, 0], [0, 1, 0]])
    assert targets.dtype == torch.float32 and torch.allclose(targets, expected)


def test_cutmix_puts_the_neighbours_box_in():
    images, targets = mix(IMAGES, LABELS, drawn(NOT_MIXED, [0.75, 1, 2, 6, 0, 4]), 3)
    expected = IMAGES[2:].clone()
    expected[:, :, 2:6, 0:4] = IMAGES[[3, 2]][:, :, 2:6, 0:4]
    assert torch.equal(images[2:], expected) and torch.equal(images[:2], IMAGES[:2])
    assert torch.allclose(targets[2:], torch.tensor([[0.0, 1, 0], [0, 1, 0]]))


def test_a_label_counts_as_much_as_its_pixels():
    share, blend, *box = Mixing(0, 1.0).draw(np.random.default_rng(0), 500, 20)
    top, bottom, left, right = box
    assert (blend == 1).all() and np.allclose(share, 1 - (bottom - top) * (right - left) / 400)
    assert min(top.min(), left.min()) == 0 and max(bottom.max(), right.max()) == 20
    share, blend, *box = Mixing(0.5, 0).draw(np.random.default_rng(0), 500, 20)
    assert np.array_equal(share, blend) and (box[0] == box[1]).all() and abs(share.mean() - 0.5) < 0.05


def test_how_often_and_which_and_how_long():
    rows = Mixing(0.8, 1.0, prob=0.6, switch_prob=0.25, epochs=3).draw(np.random.default_rng(1), 4000, 32)
    mixed, cut = (rows[1] < 1).mean(), (rows[3] > rows[2]).mean()
    assert abs(mixed - 0.6 * 0.75) < 0.03 and abs(cut - 0.6 * 0.25) < 0.03
    assert [Mixing(1, 0, epochs=3).is_on(epoch) for epoch in (0, 2, 3)] == [True, True, False]
    assert Mixing(1, 0).is_on(10**6)


def test_a_batch_that_is_not_even():
    check_pairs(4, 8)
    with pytest.raises(UserError, match="global_batch_size=9 gives each device 3 at a time"):
        check_pairs(3, 9)
