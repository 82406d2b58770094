"""One hash of the data: on every path, in every process, under every decoder; and its coverage."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from data.dataset import DatasetDataModule
from data.image_folder import ImageFolderDataModule
from lockstep.data import content_hash
from lockstep.data.image_list import ImageList
from lockstep.data.listing import Item
from lockstep.process.errors import UserError
from lockstep.training.build_data import is_same_data
from lockstep.training.weights import check_resume_data

OPTIONS = {"image_size": 8, "global_batch_size": 4, "num_workers": 0}


@pytest.fixture
def root(tmp_path):
    for i in range(24):
        folder = tmp_path / "set" / ("cat" if i % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (9 * i, 50, 0)).save(folder / f"{i:02d}.bmp")
    return tmp_path / "set"


def hash_of(tmp_path, root, **options):
    dm = ImageFolderDataModule(root=root, cache_dir=tmp_path / "cache", **OPTIONS, **options)
    dm.prepare()
    return dm.data_hash


def invert(path):
    """Change the pixels, but neither the size nor the time of a file."""
    before = path.stat()
    data = path.read_bytes()
    path.write_bytes(data[:54] + bytes(255 - byte for byte in data[54:]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_array_and_loader_have_one_hash(tmp_path, root):
    one = hash_of(tmp_path, root, path="array")
    assert one == hash_of(tmp_path, root, path="loader")
    assert one == hash_of(tmp_path / "other", root.rename(tmp_path / "moved"), path="array")


def test_a_hash_depends_on_no_decoder(tmp_path, root, monkeypatch):
    before = hash_of(tmp_path, root, path="array")
    convert = Image.Image.convert

    def inverted(image, mode):
        return ImageOps.invert(convert(image, mode))

    monkeypatch.setattr(Image.Image, "convert", inverted)
    assert hash_of(tmp_path / "other", root, path="array") == before


@pytest.mark.parametrize("sampled", [False, True])
def test_inverted_files_of_one_size_have_another_hash(sampled, tmp_path, root, monkeypatch):
    if sampled:
        monkeypatch.setattr(content_hash, "WHOLE_IMAGES", 0)
        monkeypatch.setattr(content_hash, "PIECE_BYTES", 100)
    before = hash_of(tmp_path, root, path="loader")
    for path in root.glob("*/*"):
        invert(path)
    assert hash_of(tmp_path, root, path="loader") != before


def test_of_many_images_some_are_read(monkeypatch):
    monkeypatch.setattr(content_hash, "SAMPLED_IMAGES", 3)
    assert content_hash._sample_positions(24) == [0, 11, 23]


def test_of_few_large_images_the_middle_is_read(tmp_path, root, monkeypatch):
    """24 images are more than WHOLE_BYTES, and fewer than SAMPLED_IMAGES."""
    monkeypatch.setattr(content_hash, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(content_hash, "PIECE_BYTES", 100)
    read = ImageList.read_bytes
    counts = []

    def counted(images, i, first=0, count=None):
        counts.append(count)
        return read(images, i, first, count)

    monkeypatch.setattr(ImageList, "read_bytes", counted)
    hash_of(tmp_path, root, path="loader")
    assert counts == 24 * [100]


@pytest.fixture
def masked(tmp_path, monkeypatch):
    """Three images with masks of 300 bytes, of which the middle of the first and last is read."""
    monkeypatch.setattr(content_hash, "WHOLE_IMAGES", 0)
    monkeypatch.setattr(content_hash, "SAMPLED_IMAGES", 2)
    monkeypatch.setattr(content_hash, "PIECE_BYTES", 100)
    items = []
    for i in range(3):
        (tmp_path / f"{i}.bmp").write_bytes(bytes(300))
        (tmp_path / f"mask{i}.png").write_bytes(bytes(300))
        items.append(Item(f"{i}.bmp", f"mask{i}.png", num_bytes=300))
    return ImageList(tmp_path, items, target="mask")


def test_of_large_masks_the_middle_is_read(masked):
    before = masked.hash()
    masked.mask_path(0).write_bytes(b"x" * 100 + bytes(200))
    assert masked.hash() == before
    masked.mask_path(0).write_bytes(bytes(100) + b"x" * 100 + bytes(100))
    assert masked.hash() != before


def test_the_size_of_every_mask_counts(masked):
    before = masked.hash()
    masked.mask_path(1).write_bytes(bytes(299))
    assert masked.hash() != before


def test_large_masks_beside_small_images_are_no_small_data(masked, monkeypatch):
    monkeypatch.setattr(content_hash, "WHOLE_IMAGES", 3)
    monkeypatch.setattr(content_hash, "WHOLE_BYTES", 1000)
    before = masked.hash()
    masked.mask_path(0).write_bytes(b"x" * 100 + bytes(200))
    assert masked.hash() == before


class Photographs(torch.utils.data.Dataset):
    """Images in memory, with targets of several names."""

    def __init__(self, inverted=False, noise=False):
        pixels = np.random.default_rng(0).integers(0, 256, (40, 12, 12, 3), dtype=np.uint8)
        self.pixels = 255 - pixels if inverted else pixels
        self.noise = noise

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, i):
        targets = {name: float(i) for name in ("age", "height", "mass", "speed")}
        if self.noise:
            return torch.rand(3, 12, 12), targets
        return Image.fromarray(self.pixels[i]), targets


def of_dataset(tmp_path, **options):
    dataset = Photographs(**options)
    dm = DatasetDataModule(dataset=dataset, target="any", cache_dir=tmp_path, **OPTIONS)
    dm.prepare()
    return dm.data_hash


def test_inverted_images_in_memory_have_another_hash(tmp_path):
    assert of_dataset(tmp_path) == of_dataset(tmp_path)
    assert of_dataset(tmp_path) != of_dataset(tmp_path, inverted=True)


def test_random_transforms_leave_the_hash_and_the_random_stream(tmp_path):
    before = torch.get_rng_state()
    first = of_dataset(tmp_path, noise=True)
    torch.manual_seed(99)
    assert of_dataset(tmp_path, noise=True) == first
    torch.set_rng_state(before)
    state = np.random.get_state()[1].tolist()
    of_dataset(tmp_path, noise=True)
    assert np.random.get_state()[1].tolist() == state


def test_targets_have_the_order_of_the_items(tmp_path):
    dataset = Photographs()
    dm = DatasetDataModule(dataset=dataset, target="any", cache_dir=tmp_path, **OPTIONS)
    dm.prepare()
    assert list(dm.source.targets) == ["age", "height", "mass", "speed"]


@pytest.mark.slow
def test_a_hash_is_equal_under_every_order_of_sets(tmp_path):
    program = (
        "from pathlib import Path; import test_content_hash as t; "
        f"print(t.of_dataset(Path({str(tmp_path)!r})))"
    )
    hashes = set()
    for seed in ("1", "2", "5"):
        paths = [os.path.dirname(__file__), "src"]
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True)
        hashes.add(done.stdout)
    assert len(hashes) == 1 and len(hashes.pop().strip()) == 64


def test_a_hash_of_an_older_method_is_not_compared(caplog):
    facts = {"class_names": ["a", "b"], "data_hash": "x" * 64, "hash_method": 2}
    before = {"class_names": ["a", "b"], "data_hash": "y" * 64}
    check_resume_data({"lockstep": {"data": before}}, facts, "r")
    dm = Photographs()
    dm.data_hash, dm.list_hash, dm.hash_method = "x" * 64, "names", 2
    assert is_same_data(dm, before) is None
    assert is_same_data(dm, {**before, "list_hash": "names"}) is True
    assert is_same_data(dm, {**before, "hash_method": 2}) is False


def test_other_pixels_of_the_same_files_are_refused():
    same = {"data_hash": "a", "hash_method": "sampled", "class_names": ["x"], "std": [0.2]}
    before = {**same, "range": None, "mean": [0.485]}
    check_resume_data({"lockstep": {"data": before}}, {**before, "mean": [0.48500001]}, "r")
    for now in ({"range": [0, 4095]}, {"mean": [0.2]}):
        with pytest.raises(UserError, match="trained on other pixels of the same files"):
            check_resume_data({"lockstep": {"data": before}}, {**before, **now}, "r")
