"""Ready-made data sets: CIFAR-10 and MNIST as torchvision reads them, scikit-learn's digits, made-up images."""

import gzip
import pickle
import struct
import tarfile

import numpy as np
import pytest
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10, MNIST
from torchvision.datasets.utils import calculate_md5

from data.cifar10 import ARCHIVE, FOLDER, CIFAR10DataModule
from data.digits import DigitsDataModule
from data.mnist import FILES, FashionMNISTDataModule, MNISTDataModule
from data.synthetic import SyntheticDataModule
from lockstep.runs.errors import UserError

RNG = np.random.default_rng(0)
TRAIN, TEST = 60, 20
PIXELS = RNG.integers(0, 256, (TRAIN + TEST, 32, 32, 3), dtype=np.uint8)
LABELS = np.concatenate([RNG.permutation(np.arange(n) % 10) for n in (TRAIN, TEST)])
NAMES = [f"{i:05d}" for part in (TRAIN, TEST) for i in np.random.default_rng(1).permutation(part)]


def dump(index, path):
    rows = PIXELS[index].transpose(0, 3, 1, 2).reshape(len(index), -1)
    files = [f"{NAMES[i]}.png" for i in index]
    path.write_bytes(pickle.dumps({"data": rows, "labels": LABELS[index].tolist(), "filenames": files}, 2))


@pytest.fixture
def made(tmp_path):
    """Batch files of few images, and an archive of them."""
    root = tmp_path / "cifar"
    folder = root / "batches" / FOLDER
    folder.mkdir(parents=True)
    for k in range(5):
        dump(np.arange(12 * k, 12 * k + 12), folder / f"data_batch_{k + 1}")
    dump(np.arange(TRAIN, TRAIN + TEST), folder / "test_batch")
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": names}, 2))
    (root / "archive").mkdir()
    with tarfile.open(root / "archive" / ARCHIVE, "w:gz") as archive:
        archive.add(folder, FOLDER)
    return root


@pytest.fixture
def official(made, monkeypatch):
    """The checksums of these files, in place of the real ones."""
    folder = made / "batches" / FOLDER
    for name in ("train_list", "test_list"):
        files = [[each, calculate_md5(folder / each)] for each, _ in getattr(CIFAR10, name)]
        monkeypatch.setattr(CIFAR10, name, files)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": calculate_md5(folder / "batches.meta")})
    monkeypatch.setattr(CIFAR10, "tgz_md5", calculate_md5(made / "archive" / ARCHIVE))
    return made


def cifar10(tmp_path, root, **options):
    options = {"download_dir": tmp_path / "got", "global_batch_size": 10, **options}
    return CIFAR10DataModule(root=root, cache_dir=tmp_path / "cache", **options)


def test_every_place_trains_on_torchvisions_pixels_in_the_order_of_file_names(official, tmp_path):
    hashes, theirs = set(), CIFAR10(official / "batches", train=False)
    for i, place in enumerate(("batches", f"batches/{FOLDER}", "archive", f"archive/{ARCHIVE}")):
        dm = cifar10(tmp_path / str(i), official / place, mean=0, std=1)
        dm.place()
        images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
        order = np.argsort(NAMES[TRAIN:])
        assert np.array_equal(labels, np.array(theirs.targets)[order])
        assert np.array_equal((images.permute(0, 2, 3, 1) * 255).round().numpy(), theirs.data[order])
        assert (dm.num_train, dm.num_val, dm.num_test, dm.class_names) == (54, 6, 20, theirs.classes)
        hashes.add(dm.data_hash)
    assert len(hashes) == 1


def test_files_that_are_missing_or_not_the_official_ones(made, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="is not the official CIFAR-10, or damaged"):
        cifar10(tmp_path, made / "batches").prepare()
    with pytest.raises(UserError, match=f"must be a folder that holds {FOLDER} or {ARCHIVE}"):
        cifar10(tmp_path, tmp_path / "nowhere").prepare()
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/c.tar.gz")
    with pytest.raises(UserError, match="could not be downloaded .*data=digits and data=synthetic need no download"):
        cifar10(tmp_path, None).prepare()


IMAGES = {name: RNG.integers(0, 256, (n, 28, 28), dtype=np.uint8) for name, n in ((FILES[0], 40), (FILES[2], 15))}
OF_IMAGES = {name: np.arange(n, dtype=np.uint8) % 10 for name, n in ((FILES[1], 40), (FILES[3], 15))}


def idx(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(folder, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in {**IMAGES, **OF_IMAGES}.items():
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))


def mnist(tmp_path, cls=MNISTDataModule, **options):
    return cls(cache_dir=tmp_path / "cache", global_batch_size=10, mean=0, std=1, **options)


def test_plain_and_zipped_files_and_torchvisions_folders_give_what_torchvision_reads(tmp_path):
    write(tmp_path / "zipped")
    write(tmp_path / "theirs" / "MNIST" / "raw", zipped=False)
    theirs = MNIST(tmp_path / "theirs", train=False)
    for root in (tmp_path / "zipped", tmp_path / "theirs"):
        dm = mnist(tmp_path, root=root)
        dm.place()
        assert (dm.num_train, dm.num_val, dm.num_test, dm.channels, dm.image_size) == (36, 4, 15, 1, 28)
        images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
        assert np.array_equal((images[:, 0] * 255).round().numpy(), theirs.data.numpy())
        assert np.array_equal(labels, theirs.targets) and dm.class_names == list("0123456789")


def test_fashion_mnist_is_looked_for_in_known_places(tmp_path, monkeypatch):
    write(tmp_path / "debian")
    monkeypatch.setattr(FashionMNISTDataModule, "known_places", (str(tmp_path / "none"), str(tmp_path / "debian")))
    dm = mnist(tmp_path, FashionMNISTDataModule)
    dm.prepare()
    assert dm.name == "fashion_mnist" and dm.num_test == 15
    assert dm.class_names[0] == "t-shirt" and dm.class_names[9] == "ankle boot"


def test_idx_files_that_are_missing_damaged_or_do_not_fit(tmp_path, monkeypatch):
    monkeypatch.setattr(MNIST, "mirrors", ["http://127.0.0.1:9/a/"])
    with pytest.raises(UserError, match="MNIST could not be downloaded .*data=digits"):
        mnist(tmp_path, download_dir=tmp_path / "got").prepare()
    with pytest.raises(UserError, match="must be a folder with train-images"):
        mnist(tmp_path, root=tmp_path).prepare()
    cut, labels = idx(IMAGES[FILES[0]])[:-1], OF_IMAGES[FILES[1]]
    for number, (zipped, file, content, said) in enumerate((
        (True, FILES[0], gzip.compress(cut), f"{FILES[0]}.gz is truncated or no IDX file"),
        (True, FILES[0], b"", f"{FILES[0]}.gz is truncated or no IDX file"),
        (False, FILES[0], cut, f"{FILES[0]} is truncated or no IDX file"),
        (False, FILES[1], idx(labels[:-1]), "mnist holds 55 images and 54 labels"),
        (False, FILES[1], idx(labels + 1), "has a label 10"),
    )):  # fmt: skip
        write(root := tmp_path / str(number), zipped)
        (root / (f"{file}.gz" if zipped else file)).write_bytes(content)
        with pytest.raises(UserError, match=said):
            mnist(tmp_path, root=root).prepare()


def test_all_digits_stretched_to_a_byte_with_a_test_set_that_no_seed_moves(tmp_path):
    modules = [DigitsDataModule(cache_dir=tmp_path, seed=s, global_batch_size=100, mean=0, std=1) for s in (0, 1)]
    digits, last = load_digits(), np.random.default_rng(0).permutation(1797)[-360:]
    for dm in modules:
        dm.place()
        assert (dm.num_train, dm.num_val, dm.num_test, dm.channels) == (1293, 144, 360, 1)
        images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
        assert np.array_equal(labels, digits.target[last[: len(labels)]])
        assert np.abs(images[:, 0].numpy() - digits.images[last[: len(labels)]] / 16).max() <= 0.5 / 255 + 1e-6
    assert np.array_equal(np.bincount(modules[0]._classes()), np.bincount(digits.target))
    normal = DigitsDataModule(cache_dir=tmp_path, global_batch_size=100)
    normal.place()
    images = normal.on_after_batch_transfer(next(iter(normal.train_dataloader())), 0)[0]
    assert images.shape == (100, 1, 8, 8) and abs(images.mean()) < 0.1 and abs(images.std() - 1) < 0.1


def synthetic(**options):
    return SyntheticDataModule(num_images=500, num_test_images=203, **options).read()


def test_synthetic_images_are_the_same_under_every_seed_balanced_and_of_the_sizes_asked():
    assert np.array_equal(synthetic(seed=0).images, synthetic(seed=9).images)
    assert not np.array_equal(synthetic().images, synthetic(noise=2.0).images)
    images = synthetic(num_classes=3, channels=1, image_size=20, resize=24)
    assert images.images.shape == (703, 24, 24, 1) and images.images.dtype == np.uint8
    assert sorted(np.bincount(images.labels)) == [234, 234, 235]
    assert synthetic(image_size=64, resize=70, stored_size=32).images.shape[1] == 32
