"""Images of any number of bands: NPY by NumPy, TIFF by tifffile where it is installed."""

import numpy as np
import pytest
import torch
from PIL import Image

from augmentations.policies import AutoAugment, RandAugment, ResizedCrop, ThreeAugment
from data.dataset import DatasetDataModule
from data.image_folder import ImageFolderDataModule
from lockstep.data import file_values
from lockstep.data.augmentation import CropFlip
from lockstep.process.errors import UserError
from lockstep.training.build_data import data_facts

SIDE = 12
BANDS = 5
RNG = np.random.default_rng(0)
# (2 classes, 10 images, side, side, bands): band b is around 1000 · b.
VALUES = RNG.integers(0, 1000, (2, 10, SIDE, SIDE, BANDS)) + 1000 * np.arange(BANDS)


def folder(root, values=VALUES, kind=np.uint16):
    for label, images in zip(("a", "b"), values, strict=True):
        (root / label).mkdir(parents=True)
        for i, image in enumerate(images):
            np.save(root / label / f"{i}.npy", image.astype(kind))
    return root


def module(root, cache, augmentation=None, rank=0, world_size=1, **options):
    options = {"channels": BANDS, "global_batch_size": 4, "num_workers": 0} | options
    data = ImageFolderDataModule(root=root, cache_dir=cache, image_size=SIDE, **options)
    data.set_augmentation(augmentation, {"mean": [0.4, 0.4, 0.4], "std": [0.2, 0.2, 0.2]})
    data.attach_to_ranks(rank=rank, world_size=world_size)
    return data


def batch_of(data):
    return data.on_after_batch_transfer(next(iter(data.train_dataloader())), 0)[0]


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.float32])
def test_each_band_has_its_mean_and_deviation(kind, tmp_path):
    data = module(folder(tmp_path / "x", VALUES // 20, kind), tmp_path, mean="auto", std="auto")
    images = torch.cat([batch_of(data) for _ in range(4)])
    assert len(data.mean) == len(set(data.mean)) == BANDS and data_facts(data)["channels"] == BANDS
    assert images.mean((0, 2, 3)).abs().max() < 0.3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 0.2


@pytest.mark.parametrize("augmentation", [None, CropFlip(erasing_prob=0.5), ResizedCrop()])
def test_two_ranks_see_the_pixels_of_one(augmentation, tmp_path):
    root = folder(tmp_path / "x")
    options = {"crop_padding": 2, "flip": True}
    single = batch_of(module(root, tmp_path, augmentation, **options))
    ranks = [batch_of(module(root, tmp_path, augmentation, rank, 2, **options)) for rank in (0, 1)]
    assert torch.equal(torch.cat(ranks), single)


def test_both_paths_give_equal_pixels(tmp_path):
    root = folder(tmp_path / "x")
    batches = [batch_of(module(root, tmp_path, path=path)) for path in ("array", "loader")]
    assert torch.equal(*batches)


def test_bands_are_chosen_in_their_order(tmp_path):
    root = folder(tmp_path / "x")
    data = module(root, tmp_path, channels=3, bands=[3, 2, 1], range=[0, 5000], mean=0, std=1)
    assert data_facts(data)["bands"] == [3, 2, 1]
    means = batch_of(data).mean((0, 2, 3)).tolist()
    assert means == pytest.approx([0.5, 0.3, 0.1], abs=0.02)


def test_the_alpha_of_a_picture_is_a_fourth_channel(tmp_path):
    for label in ("a", "b"):
        (tmp_path / "x" / label).mkdir(parents=True)
        for i in range(8):
            pixels = np.full((SIDE, SIDE, 4), (255, 0, 0, 51), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "x" / label / f"{i}.png")
    data = module(tmp_path / "x", tmp_path, channels=4, mean=0, std=1)
    assert batch_of(data)[0, :, 0, 0].tolist() == pytest.approx([1, 0, 0, 0.2])


@pytest.mark.parametrize(
    "augmentation",
    [RandAugment(), AutoAugment(), ThreeAugment(), CropFlip(color_jitter=[0.4])],
    ids=lambda augmentation: type(augmentation).__name__,
)
def test_colour_operations_are_refused_with_those_that_work(augmentation, tmp_path):
    with pytest.raises(UserError, match="have 5 channels. Take augmentation=crop_flip, resized"):
        module(tmp_path, tmp_path, augmentation)


def test_pairs_are_mixed(tmp_path):
    data = module(folder(tmp_path / "x"), tmp_path, CropFlip(mixup_alpha=1.0, cutmix_alpha=1.0))
    assert batch_of(data).shape == (4, BANDS, SIDE, SIDE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 3}, "its bands are 5: give data.channels=5, or choose data.bands"),
        ({"bands": [6, 1], "channels": 2}, r"data.bands=\[6, 1\], and its bands are 5"),
        ({"bands": [1, 2, 3, 4]}, "are 4 bands: give data.channels=4"),
        ({"bands": [0, 1], "channels": 2}, "must be numbers from 1"),
        ({"channels": 0}, "data.channels=0 must be 3 .colour., 1 .grey., or the number of bands"),
        ({"page": "last"}, "data.page=last must be a number from 0, or all"),
    ],
)
def test_options_that_do_not_fit(options, message, tmp_path):
    with pytest.raises(UserError, match=message):
        module(folder(tmp_path / "x"), tmp_path, **options)


@pytest.mark.parametrize("options", [{"range": "window"}, {"page": 1}])
def test_a_torch_dataset_has_no_pages_and_windows(options, tmp_path):
    with pytest.raises(UserError, match="data.page and data.range=window are of files"):
        DatasetDataModule(dataset=[], cache_dir=tmp_path, **options)


def test_a_tiff_that_pillow_does_not_read_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setattr(file_values, "has_tifffile", lambda: False)
    root = folder(tmp_path / "x")
    for label in ("a", "b"):
        for i in range(10):
            (root / label / f"{i}.npy").unlink()
            (root / label / f"{i}.tif").write_bytes(b"II*\0" + bytes(200))
    for channels in (3, BANDS):
        with pytest.raises(UserError, match="pip install tifffile"):
            batch_of(module(root, tmp_path, channels=channels))


def test_a_tiff_of_bands_is_read_as_its_array(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    for label, images in zip(("a", "b"), VALUES, strict=True):
        (tmp_path / "x" / label).mkdir(parents=True)
        for i, image in enumerate(images):
            path = tmp_path / "x" / label / f"{i}.tif"
            tifffile.imwrite(
                path, image.astype(np.uint16), photometric="minisblack", planarconfig="contig"
            )
    data = module(tmp_path / "x", tmp_path / "tiff")
    expected = batch_of(module(folder(tmp_path / "y"), tmp_path / "npy"))
    assert torch.equal(batch_of(data), expected)
