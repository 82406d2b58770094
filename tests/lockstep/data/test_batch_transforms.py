"""Pixels against torchvision v2's float result, to 1e-4."""

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.image_array import ImageArray

MEAN, STD = [0.49, 0.48, 0.44], [0.25, 0.24, 0.26]
RAW = np.random.default_rng(1).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)


def transforms(**options):
    return BatchTransforms(**{"stored_size": 32, "image_size": 32, "mean": MEAN, "std": STD, **options})


def ours(module, draws, raw=RAW):
    raw, draws = torch.from_numpy(raw), torch.from_numpy(draws)
    array = ImageArray.of_batch(raw, module.array_padding, module.window)
    return module(module.cut(array, torch.arange(len(raw)), draws), draws)


def theirs(draws, image_size, resize, padding, interpolation=InterpolationMode.BILINEAR, raw=RAW):
    """Resize, pad, crop at the drawn place, flip, normalise: one image after the other with torchvision."""
    images = torch.from_numpy(raw).permute(0, 3, 1, 2).float() / 255
    if resize != raw.shape[1]:
        images = F.resize(images, [resize, resize], interpolation, antialias=True).clamp(0, 1)
    images = F.pad(images, [padding])
    crops = [F.crop(image, int(y), int(x), image_size, image_size) for image, y, x in zip(images, *draws[:2])]
    flipped = [F.horizontal_flip(crop) if flip else crop for crop, flip in zip(crops, draws[2])]
    return F.normalize(torch.stack(flipped), MEAN, STD)


CASES = {
    "CIFAR-10's crop and flip": {"crop_padding": 4, "flip": True},
    "crop without border": {"image_size": 24, "resize": 32, "flip": True},
    "AlexNet under SLURM: 70, crop 64": {"image_size": 64, "resize": 70},
    "224 of 32": {"image_size": 224, "flip": True},
    "a size with many phases": {"image_size": 45, "flip": True},
    "shrunk, antialiased": {"image_size": 20, "flip": True},
    "shrunk and cropped": {"image_size": 16, "resize": 19},
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
    mode = InterpolationMode(options.get("interpolation", "bilinear"))
    expected = theirs(draws, image_size, options.get("resize", image_size), options.get("crop_padding", 0), mode)
    found = ours(module, draws)
    assert found.shape == expected.shape == (12, 3, image_size, image_size) and found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("resize", [32, 33, 69, 71, 70])
def test_evaluation_is_torchvisions_centre_crop(resize):
    module = transforms(image_size=28, resize=resize, crop_padding=3, flip=True)
    pipeline = v2.Compose([v2.Resize([resize, resize], antialias=True), v2.CenterCrop(28), v2.Normalize(MEAN, STD)])
    expected = pipeline(torch.from_numpy(RAW).permute(0, 3, 1, 2).float() / 255)
    found = ours(module, np.repeat(module.centre()[:, None], len(RAW), 1))
    assert (found - expected).abs().max() < 1e-4


def test_draws_reach_every_start_and_both_sides():
    module = transforms(crop_padding=4, flip=True)
    draws = module.draw(np.random.default_rng(0), 5000)
    assert [sorted(set(row.tolist())) for row in draws] == [list(range(9)), list(range(9)), [0, 1]]
    assert (transforms().draw(np.random.default_rng(0), 5) == 0).all()


def test_a_large_array_without_borders_gives_the_same_pixels():
    module = transforms(crop_padding=4, flip=True)
    draws = torch.from_numpy(module.draw(np.random.default_rng(2), len(RAW)))
    plain, bordered = (ImageArray.of_batch(torch.from_numpy(RAW), padding, 32) for padding in (0, 4))
    assert module.whole_images(plain.layout) and not module.whole_images(bordered.layout)
    assert torch.equal(module.cut(plain, torch.arange(12), draws), module.cut(bordered, torch.arange(12), draws))


def test_grey_images():
    module = BatchTransforms(stored_size=32, image_size=32, mean=[0.5], std=[0.25], crop_padding=2)
    draws = module.draw(np.random.default_rng(0), 12)
    found = ours(module, draws, RAW[..., :1])
    image = np.pad(RAW[5, :, :, 0], 2)[draws[0, 5] : draws[0, 5] + 32, draws[1, 5] : draws[1, 5] + 32]
    assert found.shape == (12, 1, 32, 32)
    assert np.allclose(found[5, 0].numpy(), (image / 255 - 0.5) / 0.25, atol=1e-5)


def test_the_models_product_precision_does_not_reach_the_pixels():
    torch.set_float32_matmul_precision("medium")
    try:
        module = transforms(image_size=64, resize=70)
        draws = module.draw(np.random.default_rng(2), len(RAW))
        assert (ours(module, draws) - theirs(draws, 64, 70, 0)).abs().max() < 1e-4
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
