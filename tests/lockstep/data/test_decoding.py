"""Images from files, and their augmentation."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from augmentations.policies import (
    AutoAugment,
    RandAugment,
    ResizedCrop,
    ThreeAugment,
    TrivialAugment,
)
from lockstep.data.augmentation import CropFlip, Mixing, mix
from lockstep.data.decoding import (
    SUFFIXES,
    CorruptImage,
    TooLargeImage,
    open_image,
    open_mask,
    to_array,
)
from lockstep.data.framing import Framing
from lockstep.data.image_list import ImageList
from lockstep.data.listing import Item
from lockstep.data.reading import Reading


def decode(path, framing):
    return to_array(framing.square(open_image(path, framing.channels)))


SQUARE, GREY = Framing(24, 24), Framing(24, 24, channels=1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_camera_says(tmp_path, orientation):
    """Exif 2.3: what lies in the file's first row and column, for each of the eight."""
    upright = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    turned = {2: np.fliplr(upright), 3: np.rot90(upright, 2), 4: np.flipud(upright), 5: upright.T,
              6: np.rot90(upright), 7: np.rot90(upright, 2).T, 8: np.rot90(upright, 3)}  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(turned.get(orientation, upright)).save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.asarray(open_image(tmp_path / "x.png", 1)), upright)


@pytest.mark.parametrize(
    "kind", ["png", "webp", "gif", "tiff", "palette png", "grey png", "tRNS png"]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_transparent_images_lie_on_white(kind, channels):
    """Black shapes on transparent black: without a background all would be black."""
    alpha = np.zeros((8, 8), np.uint8)
    alpha[2:6, 2:6] = 255
    image = Image.fromarray(np.dstack([np.zeros((8, 8, 3), np.uint8), alpha]))
    options = {"lossless": True} if kind == "webp" else {}
    if kind == "palette png":
        image = image.quantize(4)
    elif kind == "grey png":
        image = image.convert("LA")
    elif kind == "tRNS png":
        image, options = (
            Image.fromarray(np.where(alpha, 0, 9).astype(np.uint8)),
            {"transparency": 9},
        )
    out = io.BytesIO()
    image.save(out, kind.split()[-1], **options)
    found = np.asarray(open_image(out.getvalue(), channels, name=f"x.{kind.split()[-1]}"))
    expected = np.where(alpha, 0, 255)
    assert np.array_equal(found if channels == 1 else found[..., 0], expected)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_keep_their_shades(tmp_path, suffix):
    shades = np.linspace(0, 65535, 24 * 24).round().astype(np.uint16).reshape(24, 24)
    Image.fromarray(shades).save(tmp_path / f"x.{suffix}")
    for framing in (GREY, SQUARE):
        found = decode(tmp_path / f"x.{suffix}", framing)
        assert np.array_equal(
            found, np.repeat(np.round(shades / 257)[..., None], framing.channels, 2)
        )


def test_a_text_named_jpg_is_named(tmp_path):
    (tmp_path / "a.jpg").write_text("no image")
    with pytest.raises(
        CorruptImage, match=r"a.jpg cannot be decoded \(it is no image of a known format\)"
    ):
        open_image((tmp_path / "a.jpg").read_bytes(), 3, name=tmp_path / "a.jpg")


def test_a_mask_is_opened_by_no_other_program(tmp_path):
    Image.new("L", (9, 9)).save(tmp_path / "a.png", "EPS")
    with pytest.raises(CorruptImage, match="mask .*a.png .* no image of a known format"):
        open_mask(tmp_path / "a.png")


def test_a_mask_has_the_largest_size_of_images(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
    Image.new("L", (9, 9)).save(tmp_path / "a.png")
    images = ImageList(tmp_path, [Item("a.png", "a.png")], target="mask")
    images.reading = Reading(max_megapixels=60e-6)
    with pytest.raises(TooLargeImage, match="the mask .*a.png has more than"):
        images.read_mask(0)


def test_thirty_two_bits_are_refused(tmp_path):
    Image.fromarray(np.ones((9, 9), np.float32)).save(tmp_path / "x.tif")
    with pytest.raises(CorruptImage, match="x.tif cannot be decoded .32 bits per pixel"):
        decode(tmp_path / "x.tif", SQUARE)


def test_colours_of_floats_ask_for_their_range(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((9, 9, 3)))
    with pytest.raises(
        CorruptImage, match="colours of float64 .*give data.range=.*If it is damaged"
    ):
        decode(tmp_path / "x.npy", SQUARE)


ENDINGS = [".jfif", ".jpe", ".avif", ".tga", ".jp2", ".ico", ".pcx", ".dds", ".qoi", ".sgi", ".mpo"]


@pytest.mark.parametrize(
    ("suffix", "name"), [*((end, f"x{end}") for end in ENDINGS), (".avif", "named.jpg")]
)
def test_endings_that_pillow_reads(tmp_path, suffix, name):
    Image.new("RGB", (32, 32), (0, 200, 0)).save(tmp_path / f"x{suffix}")
    (tmp_path / f"x{suffix}").rename(tmp_path / name)
    assert suffix in SUFFIXES
    assert np.abs(decode(tmp_path / name, SQUARE).mean((0, 1)) - (0, 200, 0)).max() < 5


AUGMENTATIONS = [
    CropFlip(), CropFlip(color_jitter=[0.4, 0.4, 0.4, 0.1], erasing_prob=1.0), ResizedCrop(), ResizedCrop(scale=None),
    RandAugment(), TrivialAugment(), AutoAugment(), ThreeAugment(),
]  # fmt: skip


@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(3000, 2), (2, 3000), (1, 1)])
def test_extreme_shapes_under_every_augmentation(augmentation, channels, size):
    framing = Framing(64, 72, crop_padding=4, flip=True, channels=channels, mean=(0.5,) * channels)
    image = Image.new("L" if channels == 1 else "RGB", size, 120 if channels == 1 else (120, 0, 9))
    assert augmentation.pipeline(framing)(image).size == (64, 64)
    assert framing.square(image).size == (72, 72)


# Mixup and CutMix of pairs.

IMAGES = torch.rand((4, 3, 8, 8), generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([2, 0, 1, 1])
NOT_MIXED = [1, 1, 0, 0, 0, 0]


def test_mixup_blends_neighbours_and_cutmix_puts_the_neighbours_box_in():
    drawn = torch.tensor([[0.7, 0.7, 0, 0, 0, 0], [0.75, 1, 2, 6, 0, 4]], dtype=torch.float64).T
    images, targets = mix(IMAGES, LABELS, drawn, 3)
    cut = IMAGES[2:].clone()
    cut[:, :, 2:6, 0:4] = IMAGES[[3, 2]][:, :, 2:6, 0:4]
    assert torch.allclose(images[:2], 0.7 * IMAGES[:2] + 0.3 * IMAGES[[1, 0]]) and torch.equal(
        images[2:], cut
    )
    expected = torch.tensor([[0.3, 0, 0.7], [0.7, 0, 0.3], [0, 1, 0], [0, 1, 0]])
    assert targets.dtype == torch.float32 and torch.allclose(targets, expected)
    images, targets = mix(IMAGES, LABELS, torch.tensor([NOT_MIXED, NOT_MIXED]).double().T, 3)
    assert torch.equal(images, IMAGES) and torch.equal(targets.argmax(1), LABELS)


def test_a_label_counts_as_much_as_its_pixels():
    share, blend, *box = Mixing(0, 1.0).draw(np.random.default_rng(0), 500, 20)
    top, bottom, left, right = box
    assert (blend == 1).all() and np.allclose(share, 1 - (bottom - top) * (right - left) / 400)
    assert min(top.min(), left.min()) == 0 and max(bottom.max(), right.max()) == 20
    share, blend, *box = Mixing(0.5, 0).draw(np.random.default_rng(0), 500, 20)
    assert (
        np.array_equal(share, blend) and (box[0] == box[1]).all() and abs(share.mean() - 0.5) < 0.05
    )


def test_how_often_and_which():
    rows = Mixing(0.8, 1.0, prob=0.6).draw(np.random.default_rng(1), 4000, 32)
    mixed, cut = (rows[1] < 1).mean(), (rows[3] > rows[2]).mean()
    assert abs(mixed - 0.3) < 0.03 and abs(cut - 0.3) < 0.03


def test_an_unknown_label_spoils_no_unmixed_neighbour():
    nan = float("nan")
    labels = torch.tensor([[1.0, 0.0], [nan, 1.0], [1.0, 1.0], [nan, 0.0]])
    drawn = torch.tensor([NOT_MIXED, [0.5, 0.5, 0, 0, 0, 0]]).double().T
    _, targets = mix(IMAGES, labels, drawn, 2)
    expected = torch.tensor([[1.0, 0.0], [nan, 1.0], [nan, 0.5], [nan, 0.5]])
    torch.testing.assert_close(targets, expected, equal_nan=True)
