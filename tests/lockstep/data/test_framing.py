"""Squares as timm's evaluation makes them.

Mean, deviation, crop as stated, as weights want, or as the data have.

Pixels of a whole batch against torchvision, image by image.
"""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.data.framing import BatchTransforms, Framing, resolve_resize
from lockstep.data.normalisation import resolve_normalisation
from lockstep.process.errors import UserError

RNG = np.random.default_rng(4)


def photograph(width, height):
    """Smooth and full of detail, as pictures are."""
    small = RNG.integers(0, 256, (5, 5, 3), dtype=np.uint8)
    smooth = np.asarray(
        Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    ).astype(float)
    return Image.fromarray((smooth + RNG.normal(0, 20, smooth.shape)).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize(
    "name", ["resnet18", "vit_base_patch32_224", "tf_efficientnet_lite0", "resnet50.a2_in1k"]
)
@pytest.mark.parametrize("image_size", [96, 97])
def test_evaluation_is_timms_to_the_last_digit(name, image_size):
    wanted = resolve_data_config(pretrained_cfg=timm.get_pretrained_cfg(name).to_dict())
    theirs = create_transform(
        **{**wanted, "input_size": (3, image_size, image_size)}, is_training=False
    )
    resize = resolve_resize(image_size, None, wanted["crop_pct"])
    framing = Framing(
        image_size, resize, "crop", wanted["interpolation"], mean=tuple(wanted["mean"])
    )
    transforms = BatchTransforms(framing, wanted["std"])
    for _ in range(12):
        image = photograph(*RNG.integers(60, 300, 2))
        square = torch.from_numpy(np.array(framing.square(image)))[None]
        moved = transforms.resize_crop_flip(
            square, torch.from_numpy(transforms.centre_crop())[:, None], "bilinear"
        )
        assert torch.allclose(transforms.normalise(moved)[0], theirs(image), atol=1e-5), image.size


def test_the_exported_crop_share_gives_the_resized_side():
    for image_size in range(1, 300, 7):
        for resize in range(image_size, image_size + 60):
            assert resolve_resize(image_size, None, Framing(image_size, resize).crop_pct) == resize
    assert [
        resolve_resize(224, None, 0.875),
        resolve_resize(224, 300, 0.875),
        resolve_resize(32, None, 1),
    ] == [
        256,
        300,
        32,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"image_size": 12, "resize": 10},
            "image_size=12 data.resize=10 .*image_size is from 1 to resize",
        ),
        ({"fit": "stretch"}, "data.fit=stretch must be one of crop, squash"),
        ({"interpolation": "lanczos"}, "data.interpolation=lanczos"),
    ],
)
def test_what_contradicts_itself(options, message):
    with pytest.raises(UserError, match=message):
        Framing(**{"image_size": 8, "resize": 8, **options})


OWN = {"mean": (0.1, 0.2, 0.3), "std": (0.2, 0.2, 0.2)}
AUTO = dict.fromkeys(("mean", "std", "crop_pct", "interpolation"), "auto")
WANTED = {"mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
OF_DATA = {"mean": [0.1, 0.2, 0.3], "std": [0.2] * 3, "crop_pct": 1, "interpolation": "bilinear"}
STATED = {"mean": 0.5, "std": [0.2] * 3, "crop_pct": 1.0, "interpolation": "auto"}


@pytest.mark.parametrize(
    ("stated", "wanted", "used", "taken"),
    [
        (AUTO, WANTED, WANTED, {*WANTED}),
        (AUTO, {}, OF_DATA, set()),
        ({**AUTO, "mean": None}, WANTED, {**WANTED, "mean": [0.1, 0.2, 0.3]}, {*WANTED} - {"mean"}),
        (AUTO, {**WANTED, "crop_pct": 1.15}, {**WANTED, "crop_pct": 1.0}, set(WANTED)),
        (STATED, WANTED, {**WANTED, "std": [0.2] * 3, "crop_pct": 1.0}, {"interpolation"}),
    ],
)
def test_values_are_stated_or_the_weights_or_the_datas(stated, wanted, used, taken):
    found = resolve_normalisation(stated, OWN, wanted, 3)
    assert {key: getattr(found, key) for key in used} == used and set(found.from_weights) == taken


def test_weights_of_colour_images_on_grey_ones():
    wanted = {"mean": [0.1, 0.2, 0.3], "std": [0.2, 0.3, 0.4]}
    found = resolve_normalisation(AUTO, {"mean": (0.7,), "std": (0.8,)}, wanted, 1)
    assert found.mean == [pytest.approx(0.2)] and found.std == [pytest.approx(0.3)]


MEAN, STD = [0.49, 0.48, 0.44], [0.25, 0.24, 0.26]
RAW = np.random.default_rng(1).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
ONE_STEP = 1.01 / 255 / min(STD)  # what was resized may round otherwise


def made(transforms, images, draws):
    moved = transforms.resize_crop_flip(
        torch.from_numpy(images), torch.from_numpy(draws), transforms.framing.interpolation
    )
    return transforms.normalise(moved)


def theirs(draws, framing):
    """Resize, pad, crop at the drawn place, flip, normalise: one image after the other with
    torchvision.
    """
    images, size = torch.from_numpy(RAW).permute(0, 3, 1, 2), framing.image_size
    if framing.resize != RAW.shape[1]:
        images = F.resize(
            images, [framing.resize] * 2, InterpolationMode(framing.interpolation), antialias=True
        )
    images = F.pad(images, [framing.crop_padding])
    crops = [F.crop(image, int(y), int(x), size, size) for image, y, x in zip(images, *draws[:2])]
    flipped = [F.horizontal_flip(crop) if flip else crop for crop, flip in zip(crops, draws[2])]
    return F.normalize(torch.stack(flipped).float() / 255, MEAN, STD)


CASES = {
    "CIFAR-10's crop and flip": {"crop_padding": 4, "flip": True},
    "70, crop 64": {"image_size": 64, "resize": 70},
    "224 of 32": {"image_size": 224, "flip": True},
    "shrunk, antialiased": {"image_size": 20, "flip": True},
    "bicubic, shrunk and cropped": {"image_size": 16, "resize": 19, "interpolation": "bicubic"},
    "enlarged with a border": {"image_size": 28, "resize": 69, "crop_padding": 3, "flip": True},
}


@pytest.mark.parametrize("case", CASES)
def test_pixels_are_torchvisions(case):
    options = {"image_size": 32, **CASES[case]}
    framing = Framing(**{"resize": options["image_size"], **options}, mean=tuple(MEAN))
    transforms, most = BatchTransforms(framing, STD), 1e-5 if framing.resize == 32 else ONE_STEP
    draws = transforms.draw_crops(np.random.default_rng(2), len(RAW))
    found, expected = made(transforms, RAW, draws), theirs(draws, framing)
    assert (
        found.shape == expected.shape == (12, 3, *[framing.image_size] * 2)
        and found.dtype == torch.float32
    )
    assert (found - expected).abs().max() < most
    expected = F.center_crop(theirs(draws * 0, Framing(framing.resize, framing.resize, "crop", framing.interpolation)),
                             [framing.image_size])  # fmt: skip
    assert (
        made(transforms, RAW, transforms.centre_crop()[:, None].repeat(12, 1)) - expected
    ).abs().max() < most


def test_draws_reach_every_start_and_both_sides():
    draws = BatchTransforms(Framing(32, 32, crop_padding=4, flip=True), STD).draw_crops(
        np.random.default_rng(0), 5000
    )
    assert [sorted(set(row.tolist())) for row in draws] == [list(range(9)), list(range(9)), [0, 1]]
    assert (
        BatchTransforms(Framing(32, 32), STD).draw_crops(np.random.default_rng(0), 5) == 0
    ).all()
