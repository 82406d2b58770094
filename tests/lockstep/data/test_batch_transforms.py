"""Pixels of a whole batch against torchvision, image by image."""

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.framing import Framing

MEAN, STD = [0.49, 0.48, 0.44], [0.25, 0.24, 0.26]
RAW = np.random.default_rng(1).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
ONE_STEP = 1.01 / 255 / min(STD)  # what was resized may round otherwise


def transforms(image_size=32, resize=None, mean=MEAN, std=STD, **options):
    return BatchTransforms(Framing(image_size, resize or image_size, mean=tuple(mean), **options), std)


def images(module, raw, draws, interpolation="bilinear"):
    return module.normalise(module.moved(torch.from_numpy(raw), torch.from_numpy(draws), interpolation))


def theirs(draws, image_size, resize, padding, interpolation=InterpolationMode.BILINEAR):
    """Resize, pad, crop at the drawn place, flip, normalise: one image after the other with torchvision."""
    images = torch.from_numpy(RAW).permute(0, 3, 1, 2)
    if resize != RAW.shape[1]:
        images = F.resize(images, [resize, resize], interpolation, antialias=True)
    images = F.pad(images, [padding])
    crops = [F.crop(image, int(y), int(x), image_size, image_size) for image, y, x in zip(images, *draws[:2])]
    flipped = [F.horizontal_flip(crop) if flip else crop for crop, flip in zip(crops, draws[2])]
    return F.normalize(torch.stack(flipped).float() / 255, MEAN, STD)


CASES = {
    "CIFAR-10's crop and flip": {"crop_padding": 4, "flip": True},
    "crop without border": {"image_size": 24, "resize": 32, "flip": True},
    "70, crop 64": {"image_size": 64, "resize": 70},
    "224 of 32": {"image_size": 224, "flip": True},
    "shrunk, antialiased": {"image_size": 20, "flip": True},
    "bicubic, enlarged": {"image_size": 45, "flip": True, "interpolation": "bicubic"},
    "bicubic, shrunk and cropped": {"image_size": 16, "resize": 19, "interpolation": "bicubic"},
    "enlarged with a border": {"image_size": 48, "crop_padding": 5, "flip": True},
}


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_torchvisions(case):
    options = CASES[case]
    module = transforms(**options)
    draws = module.draw(np.random.default_rng(2), len(RAW))
    image_size = options.get("image_size", 32)
    resize, mode = options.get("resize", image_size), InterpolationMode(options.get("interpolation", "bilinear"))
    expected = theirs(draws, image_size, resize, options.get("crop_padding", 0), mode)
    found = images(module, RAW, draws, options.get("interpolation", "bilinear"))
    assert found.shape == expected.shape == (12, 3, image_size, image_size) and found.dtype == torch.float32
    assert (found - expected).abs().max() < (1e-5 if resize == 32 else ONE_STEP)


@pytest.mark.parametrize("resize", [32, 33, 69, 71, 70])
def test_evaluation_is_torchvisions_centre_crop(resize):
    module = transforms(image_size=28, resize=resize, crop_padding=3, flip=True)
    pipeline = v2.Compose([v2.Resize([resize, resize], antialias=True), v2.CenterCrop(28)])
    expected = F.normalize(pipeline(torch.from_numpy(RAW).permute(0, 3, 1, 2)).float() / 255, MEAN, STD)
    centre = module.centre()[:, None].repeat(len(RAW), 1)
    assert (images(module, RAW, centre) - expected).abs().max() < (1e-5 if resize == 32 else ONE_STEP)


def test_draws_reach_every_start_and_both_sides():
    module = transforms(crop_padding=4, flip=True)
    draws = module.draw(np.random.default_rng(0), 5000)
    assert [sorted(set(row.tolist())) for row in draws] == [list(range(9)), list(range(9)), [0, 1]]
    assert (transforms().draw(np.random.default_rng(0), 5) == 0).all()


def test_grey_images():
    module = transforms(mean=[0.5], std=[0.25], crop_padding=2)
    draws = module.draw(np.random.default_rng(0), 12)
    found = images(module, RAW[..., :1], draws)
    image = np.pad(RAW[5, :, :, 0], 2)[draws[0, 5] : draws[0, 5] + 32, draws[1, 5] : draws[1, 5] + 32]
    assert found.shape == (12, 1, 32, 32)
    assert np.allclose(found[5, 0].numpy(), (image / 255 - 0.5) / 0.25, atol=1e-5)
