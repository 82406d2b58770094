"""MNIST and Fashion-MNIST from IDX files."""

import gzip
import struct

import numpy as np
import pytest
from torchvision.datasets import MNIST

from data.mnist import FILES, FashionMNISTDataModule, MNISTDataModule
from lockstep.runs.errors import UserError

RNG = np.random.default_rng(0)
IMAGES = {name: RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8) for name, n in ((FILES[0], 40), (FILES[2], 15))}
LABELS = {name: np.arange(n, dtype=np.uint8) % 10 for name, n in ((FILES[1], 40), (FILES[3], 15))}


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(folder, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in {**IMAGES, **LABELS}.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))


def module(tmp_path, cls=MNISTDataModule, **options):
    return cls(cache_dir=tmp_path / "cache", global_batch_size=10, mean=0, std=1, **options)


def test_plain_and_zipped_files_and_torchvisions_folders_give_what_torchvision_reads(tmp_path):
    write(tmp_path / "zipped")
    write(tmp_path / "theirs" / "MNIST" / "raw", zipped=False)
    theirs = MNIST(tmp_path / "theirs", train=False)
    for root in (tmp_path / "zipped", tmp_path / "theirs"):
        dm = module(tmp_path, root=root)
        dm.place()
        assert (dm.num_train, dm.num_val, dm.num_test, dm.channels, dm.image_size) == (36, 4, 15, 1, 28)
        images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
        assert np.array_equal((images[:, 0] * 255).round().numpy(), theirs.data.numpy())
        assert np.array_equal(labels, theirs.targets) and dm.class_names == list("0123456789")


def test_fashion_mnist_is_looked_for_in_known_places(tmp_path, monkeypatch):
    write(tmp_path / "debian")
    monkeypatch.setattr(FashionMNISTDataModule, "known_places", (str(tmp_path / "none"), str(tmp_path / "debian")))
    dm = module(tmp_path, FashionMNISTDataModule)
    dm.prepare()
    assert dm.name == "fashion_mnist" and dm.num_test == 15
    assert dm.class_names[0] == "t-shirt" and dm.class_names[9] == "ankle boot"


def test_without_files_and_network(tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/a/"])
    with pytest.raises(UserError, match="MNIST could not be downloaded .*data=digits"):
        module(tmp_path, download_dir=tmp_path / "got").prepare()
    with pytest.raises(UserError, match="must be a folder with train-images"):
        module(tmp_path, root=tmp_path).prepare()


@pytest.mark.parametrize("content", [idx(IMAGES[FILES[0]])[:-1], b"", b"\x00\x00\x0d\x03" + bytes(100)])
def test_damaged_files_are_named(tmp_path, content):
    for zipped in (False, True):
        write(tmp_path / str(zipped), zipped)
        path = tmp_path / str(zipped) / (f"{FILES[0]}.gz" if zipped else FILES[0])
        path.write_bytes(gzip.compress(content) if zipped else content)
        with pytest.raises(UserError, match=f"{path.name} is truncated or no IDX file"):
            module(tmp_path, root=tmp_path / str(zipped)).prepare()


def test_files_that_do_not_fit_together(tmp_path):
    write(tmp_path, zipped=False)
    (tmp_path / FILES[1]).write_bytes(idx(LABELS[FILES[1]][:-1]))
    with pytest.raises(UserError, match="is not MNIST"):
        module(tmp_path, root=tmp_path).prepare()
    (tmp_path / FILES[1]).write_bytes(idx(LABELS[FILES[1]] + 1))
    with pytest.raises(UserError, match="has a label 10"):
        module(tmp_path, root=tmp_path).prepare()
