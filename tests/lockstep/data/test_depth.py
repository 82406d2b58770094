"""Images of more than 8 bits: what a net gets of them, and what the log says."""

import contextlib
import json

import numpy as np
import pytest
import torch
from PIL import Image

from augmentations.policies import ThreeAugment
from data.image_folder import ImageFolderDataModule
from lockstep.data.augmentation import CropFlip
from lockstep.data.decoding import CorruptImage
from lockstep.data.image_datamodule import CHECK
from lockstep.data.reading import Reading
from lockstep.data.report import collect_settings
from lockstep.process.errors import UserError
from lockstep.training.build_data import data_facts

SIDE = 12
LOW = 244
HIGH = 360
RNG = np.random.default_rng(0)
# (2 classes, 10 images, side, side): all values of the range occur in each image.
VALUES = RNG.integers(LOW, HIGH + 1, (2, 10, SIDE, SIDE))
VALUES[..., 0, 0] = LOW
VALUES[..., 0, 1] = HIGH


def write(path, values):
    if path.suffix == ".npy":
        np.save(path, values)
    else:
        Image.fromarray(values).save(path)


def second_page(path, values):
    pages = [Image.fromarray(values)]
    Image.fromarray(np.zeros_like(values)).save(path, save_all=True, append_images=pages)


KINDS = {
    "16-bit png": (".png", lambda values: values.astype(np.uint16), write),
    "16-bit tiff": (".tif", lambda values: values.astype(np.uint16), write),
    "32-bit tiff": (".tif", lambda values: values.astype(np.int32), write),
    "float tiff": (".tif", lambda values: values.astype(np.float32), write),
    "float npy": (".npy", lambda values: values.astype(np.float64), write),
    "second page": (".tif", lambda values: values.astype(np.uint16), second_page),
}


def folder(root, kind="16-bit png", values=VALUES):
    suffix, convert, save = KINDS[kind]
    for label, images in zip(("a", "b"), values, strict=True):
        (root / label).mkdir(parents=True)
        for i, image in enumerate(images):
            save(root / label / f"{i}{suffix}", convert(image))
    return root


def module(root, cache, stage="fit", augmentation=None, **options):
    options = {
        "channels": 1,
        "global_batch_size": 4,
        "num_workers": 0,
        "mean": 0,
        "std": 1,
    } | options
    data = ImageFolderDataModule(root=root, cache_dir=cache, image_size=SIDE, **options)
    data.stage = stage
    data.set_augmentation(augmentation)
    data.attach_to_ranks()
    return data


def batch_of(data):
    return data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)[0]


def centred(data):
    """Return the images of a training in the order of the files, (n, channels, side, side)."""
    data.test_on_all()
    batches = [data.on_after_batch_transfer(batch, 0)[0] for batch in data.test_dataloader()]
    return torch.cat(batches).numpy()


EXPECTED = (VALUES.reshape(-1, 1, SIDE, SIDE) - LOW) / (HIGH - LOW)


@pytest.mark.parametrize("path", ["array", "loader"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_value_reaches_the_net(kind, path, tmp_path):
    page = 1 if kind == "second page" else 0
    data = module(folder(tmp_path / "x", kind), tmp_path, path=path, page=page)
    assert data_facts(data)["range"] == [LOW, HIGH]
    assert np.allclose(centred(data), EXPECTED, atol=1e-6)


def test_both_paths_give_equal_crops_and_flips(tmp_path):
    root = folder(tmp_path / "x")
    options = {"crop_padding": 2, "flip": True, "channels": 3, "resize": 15}
    batches = [
        batch_of(module(root, tmp_path, path=path, **options)) for path in ("array", "loader")
    ]
    assert torch.equal(*batches) and batches[0].shape == (4, 3, SIDE, SIDE)


def test_making_images_leaves_the_batch_unchanged(tmp_path):
    data = module(folder(tmp_path / "x"), tmp_path, path="loader", mean=0.5)
    batch = next(iter(data.train_dataloader()))
    first = data.on_after_batch_transfer(batch, 0)[0].clone()
    second = data.on_after_batch_transfer(batch, 0)[0]
    assert torch.equal(first, second)


def test_a_chosen_range_clips_and_warns_of_little_contrast(tmp_path):
    root = folder(tmp_path / "x")
    data = module(root, tmp_path, range=[300, 310])
    expected = ((VALUES.reshape(-1, 1, SIDE, SIDE) - 300) / 10).clip(0, 1)
    assert not data.warnings and np.allclose(centred(data), expected, atol=1e-6)
    warnings = module(root, tmp_path, range=[0, 4095]).warnings
    assert len(warnings) == 1 and "less than a tenth of the range 0 to 4095" in warnings[0]


def test_a_hot_pixel_is_warned_of(tmp_path):
    values = VALUES.copy()
    values[0, :, 3, 3] = 65535
    data = module(folder(tmp_path / "x", values=values), tmp_path)
    assert "from 244 to 360, which is less than a tenth" in data.warnings[0]
    assert "give data.range=[244,360]" in data.warnings[0]


def test_mean_and_deviation_are_those_of_the_training_images(tmp_path):
    data = module(folder(tmp_path / "x"), tmp_path, mean="auto", std="auto")
    images = EXPECTED[data.splits.train]
    assert data.mean == pytest.approx([images.mean()], abs=1e-6)
    assert data.std == pytest.approx([images.std()], abs=1e-6)
    assert data.framing.mean == tuple(data.mean)


def test_range_by_image_takes_its_percentiles(tmp_path):
    values = VALUES * (1 + np.arange(20).reshape(2, 10, 1, 1))
    data = module(folder(tmp_path / "x", values=values), tmp_path, range="image")
    low, high = np.percentile(values.reshape(20, -1), (0.5, 99.5), axis=1).reshape(2, 20, 1, 1, 1)
    expected = ((values.reshape(20, 1, SIDE, SIDE) - low) / (high - low)).clip(0, 1)
    assert np.allclose(centred(data), expected, atol=1e-6)


def test_8_bits_stay_pillows_whatever_the_range(tmp_path):
    KINDS["8-bit png"] = (".png", lambda values: (values - LOW).astype(np.uint8), write)
    root = folder(tmp_path / "x", "8-bit png")
    data = module(root, tmp_path)
    assert not data.has_float_pixels and data_facts(data)["range"] is None and not data.warnings
    assert data.source.pixels[0].dtype == np.uint8
    ranged = module(root, tmp_path, range=[0, 100])
    assert "changes nothing" in ranged.warnings[0]
    assert np.allclose(centred(ranged), centred(data), atol=1e-6)


def test_null_is_the_range_of_16_bits(tmp_path):
    data = module(folder(tmp_path / "x"), tmp_path, range=None)
    assert len(np.unique(centred(data))) <= 2


def test_images_that_differ_in_depth_are_named(tmp_path):
    root = folder(tmp_path / "x")
    Image.fromarray(np.full((SIDE, SIDE), 255, np.uint8)).save(root / "a" / "0.png")
    data = module(root, tmp_path, stage=CHECK)
    assert "differ in depth: 16 bits as a/1.png, 8 bits as a/0.png" in data.warnings[0]
    assert (centred(data)[0] == 1).all()


def test_log_and_record_state_depth_and_range(tmp_path):
    settings = collect_settings(module(folder(tmp_path / "x"), tmp_path), "none")
    assert settings["depth"].startswith("16 bits, black 244 and white 360 (data.range=auto")
    assert json.loads(json.dumps(settings))["range"] == [LOW, HIGH]


def test_pages_are_counted_and_a_missing_one_is_refused(tmp_path):
    root = folder(tmp_path / "x", "second page")
    assert "a/0.tif has 2 pages, of which data.page=0 is read" in module(root, tmp_path).warnings[0]
    with pytest.raises(UserError, match="data.page=2 counts from 0, and its pages are 2"):
        module(root, tmp_path, page=2)


def test_all_pages_are_channels(tmp_path):
    data = module(folder(tmp_path / "x", "second page"), tmp_path, page="all", channels=2)
    images = centred(data)
    assert images.shape == (20, 2, SIDE, SIDE) and not images[:, 0].any()
    assert np.allclose(images[:, 1:], VALUES.reshape(-1, 1, SIDE, SIDE) / HIGH, atol=1e-6)


@pytest.mark.parametrize("augmentation", [ThreeAugment(), CropFlip(erasing_prob=1.0)])
@pytest.mark.parametrize("channels", [1, 3])
def test_augmentations_of_single_images_keep_the_range(augmentation, channels, tmp_path):
    data = module(folder(tmp_path / "x"), tmp_path, augmentation=augmentation, channels=channels)
    images = batch_of(data)
    assert images.min() >= 0 and images.max() <= 1 and images.std() > 0.05


def test_numpy_files_beside_pictures_are_left_out(tmp_path):
    root = folder(tmp_path / "x")
    np.save(root / "a" / "features.npy", np.zeros((SIDE, SIDE)))
    assert module(root, tmp_path).left_out == {".npy files": ["a/features.npy"]}


@pytest.mark.parametrize("value", ["min", [5, 5], [1, 2, 3], [0, float("inf")], 7])
def test_ranges_that_are_none(value, tmp_path):
    with pytest.raises(UserError, match="data.range=.* must be auto, image, or two ascending"):
        module(tmp_path, tmp_path, range=value)


def test_masks_move_with_deep_images(tmp_path):
    for part in ("images", "masks"):
        (tmp_path / "x" / part).mkdir(parents=True)
    for i, values in enumerate(VALUES[0]):
        Image.fromarray(values.astype(np.uint16)).save(tmp_path / "x" / "images" / f"{i}.tif")
        mask = (values > 300).astype(np.uint8)
        Image.fromarray(mask).save(tmp_path / "x" / "masks" / f"{i}.png")
    options = {"target": "mask", "crop_padding": 2, "flip": True}
    data = module(tmp_path / "x", tmp_path, range=[300, 301], **options)
    images, masks = data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)
    counts = masks >= 0
    assert torch.equal(images[:, 0][counts], masks[counts].float()) and masks[counts].sum() > 0


def test_a_check_that_cannot_read_spoils_no_training(tmp_path, monkeypatch):
    root = folder(tmp_path / "x")
    read = Reading.read_values

    def fail(self, file, name=""):
        raise CorruptImage(f"{name} cannot be read")

    monkeypatch.setattr(Reading, "read_values", fail)
    with contextlib.suppress(CorruptImage):
        module(root, tmp_path / "cache", stage=CHECK)
    monkeypatch.setattr(Reading, "read_values", read)
    for stage in (CHECK, "fit"):
        assert module(root, tmp_path / "cache", stage=stage).reading.value_range == (LOW, HIGH)
