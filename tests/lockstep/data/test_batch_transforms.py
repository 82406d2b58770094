"""Pixels of a whole batch against torchvision, image by image."""

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.framing import Framing

MEAN, STD = [0.49, 0.48, 0.44], [0.25, 0.24, 0.26]
RAW = np.random.default_rng(1).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
ONE_STEP = 1.01 / 255 / min(STD)  # what was resized may round otherwise


def made(transforms, images, draws):
    moved = transforms.moved(torch.from_numpy(images), torch.from_numpy(draws), transforms.framing.interpolation)
    return transforms.normalise(moved)


def theirs(draws, framing):
    """Resize, pad, crop at the drawn place, flip, normalise: one image after the other with torchvision."""
    images, size = torch.from_numpy(RAW).permute(0, 3, 1, 2), framing.image_size
    if framing.resize != RAW.shape[1]:
        images = F.resize(images, [framing.resize] * 2, InterpolationMode(framing.interpolation), antialias=True)
    images = F.pad(images, [framing.crop_padding])
    crops = [F.crop(image, int(y), int(x), size, size) for image, y, x in zip(images, *draws[:2])]
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
    **{f"{side}, crop 28": {"image_size": 28, "resize": side, "crop_padding": 3, "flip": True} for side in (33, 69)},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_torchvisions(case):
    options = {"image_size": 32, **CASES[case]}
    framing = Framing(**{"resize": options["image_size"], **options}, mean=tuple(MEAN))
    transforms, most = BatchTransforms(framing, STD), 1e-5 if framing.resize == 32 else ONE_STEP
    draws = transforms.draw(np.random.default_rng(2), len(RAW))
    found, expected = made(transforms, RAW, draws), theirs(draws, framing)
    assert found.shape == expected.shape == (12, 3, *[framing.image_size] * 2) and found.dtype == torch.float32
    assert (found - expected).abs().max() < most
    expected = F.center_crop(theirs(draws * 0, Framing(framing.resize, framing.resize, "crop", framing.interpolation)),
                             [framing.image_size])  # fmt: skip
    assert (made(transforms, RAW, transforms.centre()[:, None].repeat(12, 1)) - expected).abs().max() < most


def test_draws_reach_every_start_and_both_sides():
    draws = BatchTransforms(Framing(32, 32, crop_padding=4, flip=True), STD).draw(np.random.default_rng(0), 5000)
    assert [sorted(set(row.tolist())) for row in draws] == [list(range(9)), list(range(9)), [0, 1]]
    assert (BatchTransforms(Framing(32, 32), STD).draw(np.random.default_rng(0), 5) == 0).all()


def test_grey_images():
    transforms = BatchTransforms(Framing(32, 32, crop_padding=2, mean=(0.5,)), [0.25])
    draws = transforms.draw(np.random.default_rng(0), 12)
    found = made(transforms, RAW[..., :1], draws)
    image = np.pad(RAW[5, :, :, 0], 2)[draws[0, 5] : draws[0, 5] + 32, draws[1, 5] : draws[1, 5] + 32]
    assert found.shape == (12, 1, 32, 32) and np.allclose(found[5, 0].numpy(), (image / 255 - 0.5) / 0.25, atol=1e-5)
