"""Squares as timm's evaluation makes them; mean, deviation, crop as stated, as weights want, or as the data have."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config

from lockstep.data.batch_transforms import BatchTransforms
from lockstep.data.framing import Framing, resize_of, settle
from lockstep.runs.errors import UserError

RNG = np.random.default_rng(4)


def photograph(width, height):
    """Smooth and full of detail, as pictures are."""
    small = RNG.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    return Image.fromarray((smooth + RNG.normal(0, 20, smooth.shape)).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("name", ["resnet18", "vit_base_patch32_224", "tf_efficientnet_lite0", "resnet50.a2_in1k"])
@pytest.mark.parametrize("image_size", [96, 97])
def test_evaluation_is_timms_to_the_last_digit(name, image_size):
    wanted = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    theirs = create_transform(**{**wanted, "input_size": (3, image_size, image_size)}, is_training=False)
    resize = resize_of(image_size, None, wanted["crop_pct"])
    framing = Framing(image_size, resize, "crop", wanted["interpolation"], mean=tuple(wanted["mean"]))
    transforms = BatchTransforms(framing, wanted["std"])
    for _ in range(12):
        image = photograph(*RNG.integers(60, 300, 2))
        square = torch.from_numpy(np.array(framing.square(image)))[None]
        moved = transforms.moved(square, torch.from_numpy(transforms.centre())[:, None], "bilinear")
        ours = transforms.normalise(moved)[0]
        assert torch.allclose(ours, theirs(image), atol=1e-5), image.size
        assert np.array_equal(np.asarray(framing.centre(image)), crop(square[0].numpy(), image_size))


def crop(square, side):
    start = round((len(square) - side) / 2)
    return square[start : start + side, start : start + side]


def test_the_centre_of_the_square_is_the_centre_of_the_image():
    for _ in range(200):
        size = int(RNG.integers(5, 40))
        framing = Framing(size, size + int(RNG.integers(0, 20)))
        image = photograph(*RNG.integers(20, 90, 2))
        square = framing.square(image)
        assert square.size == (framing.resize, framing.resize)
        assert np.array_equal(crop(np.asarray(square), size), np.asarray(framing.centre(image)))


def test_squash_keeps_all_of_the_image():
    image = photograph(80, 40)
    expected = image.resize((24, 24), Image.Resampling.BILINEAR)
    assert np.array_equal(np.asarray(Framing(24, 24, "squash").square(image)), np.asarray(expected))


def test_the_crop_share_that_is_exported_gives_the_resized_side_again():
    for image_size in range(1, 300, 7):
        for resize in range(image_size, image_size + 60):
            assert resize_of(image_size, None, Framing(image_size, resize).crop_pct) == resize


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 64, "resize": 32}, "data.resize=32 must be at least data.image_size=64"),
        ({"image_size": 0, "resize": 0}, "image_size=0 must be at least 1"),
        ({"image_size": 8, "resize": 8, "crop_padding": -1}, "crop_padding=-1"),
        ({"image_size": 8, "resize": 8, "fit": "stretch"}, "data.fit=stretch must be one of crop, squash"),
        ({"image_size": 8, "resize": 8, "interpolation": "lanczos"}, "data.interpolation=lanczos"),
    ],
)
def test_what_contradicts_itself(options, message):
    with pytest.raises(UserError, match=message):
        Framing(**options)


def test_the_crop_share_is_a_share():
    assert [resize_of(224, None, 0.875), resize_of(224, 300, 0.875), resize_of(32, None, 1)] == [256, 300, 32]
    for share in (0, 1.1):
        with pytest.raises(UserError, match=f"data.crop_pct={share} must be auto, or above 0"):
            resize_of(224, None, share)


OWN = {"mean": (0.1, 0.2, 0.3), "std": (0.2, 0.2, 0.2)}
AUTO = dict.fromkeys(("mean", "std", "crop_pct", "interpolation"), "auto")
WANTED = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.9, "interpolation": "bicubic"}


def test_auto_is_the_weights_and_without_them_the_datas():
    found = settle(AUTO, OWN, WANTED, 3)
    assert (found.mean, found.std, found.crop_pct, found.interpolation) == ([0.5] * 3, [0.25] * 3, 0.9, "bicubic")
    assert set(found.from_weights) == set(WANTED) and found.against_weights == ()
    found = settle(AUTO, OWN, {}, 3)
    assert (found.mean, found.std, found.crop_pct, found.interpolation) == ([0.1, 0.2, 0.3], [0.2] * 3, 1, "bilinear")
    assert found.from_weights == ()


def test_what_is_stated_counts_and_is_compared_with_the_weights():
    stated = {"mean": 0.5, "std": [0.2, 0.2, 0.2], "crop_pct": 1.0, "interpolation": "auto"}
    found = settle(stated, OWN, WANTED, 3)
    assert (found.mean, found.std, found.crop_pct) == ([0.5] * 3, [0.2] * 3, 1.0)
    assert found.from_weights == ("interpolation",) and found.against_weights == ("std", "crop_pct")
    assert settle({**AUTO, "mean": None}, OWN, WANTED, 3).mean == [0.1, 0.2, 0.3]


def test_weights_of_colour_images_on_grey_ones():
    wanted = {"mean": [0.1, 0.2, 0.3], "std": [0.2, 0.3, 0.4]}
    found = settle(AUTO, {"mean": (0.7,), "std": (0.8,)}, wanted, 1)
    assert found.mean == [pytest.approx(0.2)] and found.std == [pytest.approx(0.3)] and not found.against_weights


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"mean": [0.5, 0.5]}, "data.mean=.* must be auto, a number, or one for each of 3 channels"),
        ({"mean": "imagenet"}, "data.mean=imagenet must be auto, a number"),
        ({"std": 0}, "data.std=.* must be positive"),
    ],
)
def test_values_that_are_none(stated, message):
    with pytest.raises(UserError, match=message):
        settle({**AUTO, **stated}, OWN, {}, 3)
