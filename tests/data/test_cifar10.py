"""CIFAR-10 from each layout, in one order, verified by torchvision's checksums."""

import pickle
import tarfile

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10
from torchvision.datasets.utils import calculate_md5

from data.cifar10 import ARCHIVE, CLASS_NAMES, FOLDER, CIFAR10DataModule
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


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Batch files of few images, an archive of them, and the same images in folders."""
    root = tmp_path_factory.mktemp("cifar")
    folder = root / "batches" / FOLDER
    folder.mkdir(parents=True)
    for k in range(5):
        dump(np.arange(12 * k, 12 * k + 12), folder / f"data_batch_{k + 1}")
    dump(np.arange(TRAIN, TRAIN + TEST), folder / "test_batch")
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": CLASS_NAMES}, 2))
    for i, (pixels, label) in enumerate(zip(PIXELS, LABELS)):
        path = root / "tree" / ("train" if i < TRAIN else "test") / CLASS_NAMES[label] / f"{NAMES[i]}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
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


def module(tmp_path, root, **options):
    options = {"download_dir": tmp_path / "got", "global_batch_size": 10, **options}
    return CIFAR10DataModule(root=root, cache_dir=tmp_path / "cache", **options)


def test_every_layout_trains_on_the_same_pixels_in_the_same_order(official, tmp_path):
    first = None
    for i, place in enumerate(("batches", f"batches/{FOLDER}", "tree", "archive", f"archive/{ARCHIVE}")):
        dm = module(tmp_path / str(i), official / place, crop_padding=4, flip=True)
        dm.place()
        found = (dm.data_hash, *dm.on_after_batch_transfer(next(iter(dm.train_dataloader())), 0))
        first = first or found
        assert (dm.num_train, dm.num_val, dm.num_test, dm.class_names) == (54, 6, 20, CLASS_NAMES)
        assert found[0] == first[0] and (found[1] == first[1]).all() and (found[2] == first[2]).all()


def test_pixels_and_labels_are_those_that_torchvision_reads(official, tmp_path):
    theirs = CIFAR10(official / "batches", train=False)
    dm = module(tmp_path, official / "batches", mean=0, std=1)
    dm.place()
    images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
    order = np.argsort(NAMES[TRAIN:])
    assert np.array_equal(labels, np.array(theirs.targets)[order])
    assert np.array_equal((images.permute(0, 2, 3, 1) * 255).round().numpy(), theirs.data[order])


def test_files_that_are_not_the_official_ones_are_refused_unread(made, tmp_path):
    with pytest.raises(UserError, match="is not the official CIFAR-10, or damaged"):
        module(tmp_path, made / "batches").prepare()
    with pytest.raises(UserError, match=f"{ARCHIVE} is not the official archive, or damaged"):
        module(tmp_path, made / "archive").prepare()


def test_files_that_are_missing(made, tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        module(tmp_path, tmp_path / "nowhere").prepare()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty does not hold CIFAR-10"):
        module(tmp_path, tmp_path / "empty").prepare()
    for part in ("train", "test"):
        (tmp_path / "other" / part / "zebra").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(tmp_path / "other" / part / "zebra" / "1.png")
    with pytest.raises(UserError, match="has the classes zebra, not CIFAR-10's .*give data=image_folder"):
        module(tmp_path, tmp_path / "other").prepare()


def test_nothing_there_and_nothing_to_be_had(tmp_path, monkeypatch):
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/c.tar.gz")
    with pytest.raises(UserError, match="could not be downloaded .*data=digits and data=synthetic need no download"):
        module(tmp_path, None).prepare()
