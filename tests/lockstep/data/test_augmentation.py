"""The base of all augmentations: options, order of operations, the stream of one image."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from lockstep.data.augmentation import Augmentation, CropFlip, own_stream
from lockstep.data.framing import Framing
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


def test_a_stream_of_its_own_leaves_the_others_alone():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with own_stream(7):
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with own_stream(7):
        assert torch.equal(torch.rand(3), first)
    with own_stream(8):
        assert not torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"erasing_prob": 1.1}, "augmentation.erasing_prob=1.1 must be from 0 to 1"),
        ({"mixup_alpha": -1}, "augmentation.mixup_alpha=-1 must not be negative"),
        ({"color_jitter": [1] * 5}, "takes up to four numbers"),
        ({"color_jitter": [0, 0, 0, 0.6]}, "hue at most 0.5"),
    ],
)
def test_options_that_are_none(options, message):
    with pytest.raises(UserError, match=message):
        Augmentation(**options)


def test_images_that_are_neither_grey_nor_colour():
    with pytest.raises(UserError, match="these have 5 channels: take augmentation=crop_flip"):
        CropFlip(erasing_prob=0.1).pipeline(Framing(8, 8, channels=5, mean=(0.5,) * 5))
