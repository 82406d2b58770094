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
        assert torch.allclose(transforms.normalise(moved)[0], theirs(image), atol=1e-5), image.size


def test_the_centre_of_the_square_is_the_centre_of_the_image():
    for _ in range(200):
        size = int(RNG.integers(5, 40))
        framing = Framing(size, size + int(RNG.integers(0, 20)))
        image = photograph(*RNG.integers(20, 90, 2))
        square, start = np.asarray(framing.square(image)), round((framing.resize - size) / 2)
        assert square.shape == (framing.resize, framing.resize, 3)
        assert np.array_equal(square[start : start + size, start : start + size], np.asarray(framing.centre(image)))


def test_squash_keeps_all_of_the_image():
    image = photograph(80, 40)
    expected = image.resize((24, 24), Image.Resampling.BILINEAR)
    assert np.array_equal(np.asarray(Framing(24, 24, "squash").square(image)), np.asarray(expected))


def test_the_crop_share_that_is_exported_gives_the_resized_side_again():
    for image_size in range(1, 300, 7):
        for resize in range(image_size, image_size + 60):
            assert resize_of(image_size, None, Framing(image_size, resize).crop_pct) == resize
    assert [resize_of(224, None, 0.875), resize_of(224, 300, 0.875), resize_of(32, None, 1)] == [256, 300, 32]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0, "resize": 0}, "image_size=0 must be at least 1"),
        ({"crop_padding": -1}, "crop_padding=-1"),
        ({"fit": "stretch"}, "data.fit=stretch must be one of crop, squash"),
        ({"interpolation": "lanczos"}, "data.interpolation=lanczos"),
    ],
)
def test_what_contradicts_itself(options, message):
    with pytest.raises(UserError, match=message):
        Framing(**{"image_size": 8, "resize": 8, **options})


@pytest.mark.parametrize("share", [0, 1.1])
def test_the_crop_share_is_a_share(share):
    with pytest.raises(UserError, match=f"data.crop_pct={share} must be auto, or above 0"):
        resize_of(224, None, share)


OWN = {"mean": (0.1, 0.2, 0.3), "std": (0.2, 0.2, 0.2)}
AUTO = dict.fromkeys(("mean", "std", "crop_pct", "interpolation"), "auto")
WANTED = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
OF_DATA = {"mean": [0.1, 0.2, 0.3], "std": [0.2] * 3, "crop_pct": 1, "interpolation": "bilinear"}
STATED = {"mean": 0.5, "std": [0.2] * 3, "crop_pct": 1.0, "interpolation": "auto"}


@pytest.mark.parametrize(
    ("stated", "wanted", "used", "taken", "against"),
    [
        (AUTO, WANTED, WANTED, {*WANTED}, set()),
        (AUTO, {}, OF_DATA, set(), set()),
        ({**AUTO, "mean": None}, WANTED, {**WANTED, "mean": [0.1, 0.2, 0.3]}, {*WANTED} - {"mean"}, {"mean"}),
        (STATED, WANTED, {**WANTED, "std": [0.2] * 3, "crop_pct": 1.0}, {"interpolation"}, {"std", "crop_pct"}),
    ],
)
def test_values_are_stated_or_the_weights_or_the_datas(stated, wanted, used, taken, against):
    found = settle(stated, OWN, wanted, 3)
    assert {key: getattr(found, key) for key in used} == used
    assert (set(found.from_weights), set(found.against_weights)) == (taken, against)


def test_weights_of_colour_images_on_grey_ones():
    wanted = {"mean": [0.1, 0.2, 0.3], "std": [0.2, 0.3, 0.4]}
    found = settle(AUTO, {"mean": (0.7,), "std": (0.8,)}, wanted, 1)
    assert found.mean == [pytest.approx(0.2)] and found.std == [pytest.approx(0.3)] and not found.against_weights
    with pytest.raises(UserError, match="data.mean=imagenet must be auto, a number, or one for each of 3 channels"):
        settle({**AUTO, "mean": "imagenet"}, OWN, {}, 3)
