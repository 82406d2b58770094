"""Ready-made data sets: CIFAR-10 and MNIST as torchvision reads them, scikit-learn's digits,
generated images.
"""

import pickle
import struct
import tarfile

import numpy as np
import pytest
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, MNIST
from torchvision.datasets.utils import calculate_md5

from data.digits import DigitsDataModule
from data.synthetic import SyntheticDataModule
from data.torchvision_sets import CIFAR10DataModule, FashionMNISTDataModule, MNISTDataModule
from lockstep.process.errors import UserError

RNG = np.random.default_rng(0)
FOLDER, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"


@pytest.fixture
def official(tmp_path, monkeypatch):
    """Batch files of twelve images each, an archive of them, and their checksums in place of the
    real ones.
    """
    folder, archive = tmp_path / "batches" / FOLDER, tmp_path / "archive" / ARCHIVE
    folder.mkdir(parents=True)
    archive.parent.mkdir()
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        content = {
            "data": RNG.integers(0, 256, (12, 3072), np.uint8),
            "labels": (RNG.permutation(12) % 10).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(content, 2))
    names = [
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, 2))
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, FOLDER)
    for name in ("train_list", "test_list"):
        monkeypatch.setattr(
            CIFAR10,
            name,
            [[each, calculate_md5(folder / each)] for each, _ in getattr(CIFAR10, name)],
        )
    monkeypatch.setattr(
        CIFAR10, "meta", {**CIFAR10.meta, "md5": calculate_md5(folder / "batches.meta")}
    )
    monkeypatch.setattr(CIFAR10, "tgz_md5", calculate_md5(archive))
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/c.tar.gz")
    return tmp_path


def evaluated(dm):
    """The test images, from 0 to 255, and their labels."""
    dm.attach_to_ranks()
    images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
    return (images.permute(0, 2, 3, 1) * 255).round().numpy(), labels.numpy()


def made(cls, tmp_path, **options):
    return cls(cache_dir=tmp_path / "cache", global_batch_size=10, mean=0, std=1, **options)


def test_unpacked_and_packed_cifar10_is_torchvisions(official):
    theirs = CIFAR10(official / "batches", train=False)
    for place in ("batches", "archive"):
        dm = made(CIFAR10DataModule, official, root=official / place)
        images, labels = evaluated(dm)
        assert np.array_equal(labels, theirs.targets) and np.array_equal(images, theirs.data)
        assert dm.source.pixels[0].flags[
            "C_CONTIGUOUS"
        ]  # else each batch is copied several times as slowly
        assert (dm.num_train, dm.num_val, dm.num_test, dm.class_names) == (
            54,
            6,
            12,
            theirs.classes,
        )
    (official / "batches" / FOLDER / "data_batch_1").write_bytes(b"damaged")
    for root in (None, official / "batches"):
        with pytest.raises(
            UserError,
            match="missing or damaged, and could not be downloaded .*data=digits and data=syn",
        ):
            made(CIFAR10DataModule, official, root=root).prepare()


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("cls", [MNISTDataModule, FashionMNISTDataModule])
def test_mnist_is_torchvisions(cls, tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/a/"])
    raw = tmp_path / cls.class_in_torchvision / "raw"
    raw.mkdir(parents=True)
    images = {
        name: RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        for name, n in (("train", 40), ("t10k", 15))
    }
    for name, array in images.items():
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(array))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(
            idx(np.arange(len(array), dtype=np.uint8) % 10)
        )
    dm = made(cls, tmp_path, root=tmp_path)
    pixels, labels = evaluated(dm)
    assert np.array_equal(pixels[..., 0], images["t10k"]) and np.array_equal(
        labels, np.arange(15) % 10
    )
    assert (dm.num_train, dm.num_val, dm.num_test, dm.channels, dm.image_size) == (36, 4, 15, 1, 28)
    assert dm.class_names == list("0123456789") or (dm.class_names[0], dm.class_names[9]) == (
        "t-shirt",
        "ankle boot",
    )
    for file, content, said in (
        ("t10k-images-idx3-ubyte", idx(images["t10k"])[:-1], "missing or damaged"),
        ("t10k-images-idx3-ubyte", idx(images["t10k"][:-1]), "There are 54 images and 55 labels"),
        (
            "train-labels-idx1-ubyte",
            idx(np.arange(40, dtype=np.uint8)),
            "A label is 0 or 39; the classes go from 0 to",
        ),
    ):
        before = (raw / file).read_bytes()
        (raw / file).write_bytes(content)
        with pytest.raises(UserError, match=said):
            made(cls, tmp_path, root=tmp_path).prepare()
        (raw / file).write_bytes(before)


def test_digits_fill_a_byte_and_their_test_set_stays(tmp_path):
    digits, last = load_digits(), np.random.default_rng(0).permutation(1797)[-360:]
    for seed in (0, 1):
        dm = made(DigitsDataModule, tmp_path, seed=seed)
        images, labels = evaluated(dm)
        assert (dm.num_train, dm.num_val, dm.num_test, dm.channels) == (1293, 144, 360, 1)
        assert np.array_equal(labels, digits.target[last[: len(labels)]])
        assert (
            np.abs(images[..., 0] / 255 - digits.images[last[: len(labels)]] / 16).max()
            <= 0.5 / 255 + 1e-6
        )
        assert np.array_equal(np.bincount(dm.source.classes), np.bincount(digits.target))


def synthetic(**options):
    return SyntheticDataModule(num_images=500, num_test_images=203, **options).read()


def test_synthetic_images_are_balanced_and_equal_under_every_seed():
    assert np.array_equal(synthetic(seed=0).images, synthetic(seed=9).images)
    assert not np.array_equal(synthetic().images, synthetic(noise=2.0).images)
    images = synthetic(num_classes=3, channels=1, image_size=20, resize=24)
    assert images.images.shape == (703, 24, 24, 1) and images.images.dtype == np.uint8
    assert sorted(np.bincount(images.targets[""])) == [234, 234, 235]
    assert synthetic(image_size=64, resize=70, stored_size=32).images.shape[1] == 32
