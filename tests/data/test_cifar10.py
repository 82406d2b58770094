"""CIFAR-10 from each layout, its order, and files that are damaged or hostile."""

import io
import pickle
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10

from data.cifar10 import ARCHIVE, CLASS_NAMES, FOLDER, TRAIN_FILES, CIFAR10DataModule
from lockstep.runs.errors import UserError

RNG = np.random.default_rng(0)
TRAIN, TEST = 60, 20
PIXELS = RNG.integers(0, 256, (TRAIN + TEST, 32, 32, 3), dtype=np.uint8)
LABELS = np.concatenate([RNG.permutation(np.arange(n) % 10) for n in (TRAIN, TEST)])
NAMES = [f"{i:05d}" for part in (TRAIN, TEST) for i in np.random.default_rng(1).permutation(part)]


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, as the official files have them."""

    dispatch = dict(pickle._Pickler.dispatch)

    def save_bytes(self, obj):
        self.write(b"T" + struct.pack("<i", len(obj)) + obj)
        self.memoize(obj)

    dispatch[bytes] = save_bytes


def dump(content, path):
    file = io.BytesIO()
    Python2Pickler(file, 2).dump(content)
    path.write_bytes(file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))


def batch(index, changes):
    rows = PIXELS[index].transpose(0, 3, 1, 2).reshape(len(index), -1)
    names = [f"{NAMES[i]}.png".encode() for i in index]
    return {
        b"data": rows,
        b"labels": LABELS[index].tolist(),
        b"filenames": names,
        b"batch_label": b"x",
        **(changes or {}),
    }


def write_batches(root, changes=None):
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for k, name in enumerate(TRAIN_FILES):
        dump(batch(np.arange(12 * k, 12 * k + 12), changes), folder / name)
    dump(batch(np.arange(TRAIN, TRAIN + TEST), None), folder / "test_batch")
    dump({b"label_names": [name.encode() for name in CLASS_NAMES]}, folder / "batches.meta")
    return folder


def write_tree(root):
    for i, (pixels, label) in enumerate(zip(PIXELS, LABELS)):
        path = root / ("train" if i < TRAIN else "test") / CLASS_NAMES[label] / f"{NAMES[i]}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)


def write_archive(root):
    root.mkdir()
    write_batches(root / "made")
    with tarfile.open(root / ARCHIVE, "w:gz") as archive:
        archive.add(root / "made" / FOLDER, FOLDER)
    return root / ARCHIVE


def module(tmp_path, root, **options):
    return CIFAR10DataModule(root=root, cache_dir=tmp_path / "cache", global_batch_size=10, **options)


def content(tmp_path, root):
    dm = module(tmp_path, root, crop_padding=4, flip=True)
    dm.place()
    images, labels = dm.on_after_batch_transfer(next(iter(dm.train_dataloader())), 0)
    return dm, images, labels


def test_every_layout_trains_on_the_same_pixels_in_the_same_order(tmp_path):
    write_batches(tmp_path / "batches")
    write_tree(tmp_path / "tree")
    archive = write_archive(tmp_path / "archive")
    roots = [tmp_path / "batches", tmp_path / "batches" / FOLDER, tmp_path / "tree", archive, tmp_path / "archive"]
    (first, images, labels), *others = [content(tmp_path, root) for root in roots]
    assert (first.num_train, first.num_val, first.num_test) == (54, 6, 20) and first.class_names == CLASS_NAMES
    for dm, other_images, other_labels in others:
        assert dm.data_hash == first.data_hash
        assert (images == other_images).all() and (labels == other_labels).all()


def test_pixels_and_labels_are_those_that_torchvision_reads(tmp_path, monkeypatch):
    write_batches(tmp_path)
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": None})
    theirs = CIFAR10(tmp_path, train=False)
    dm = module(tmp_path, tmp_path, mean=0, std=1)
    dm.place()
    images, labels = dm.on_after_batch_transfer(next(iter(dm.test_dataloader())), 0)
    order = np.argsort(NAMES[TRAIN:])
    assert np.array_equal(labels, np.array(theirs.targets)[order])
    assert np.array_equal((images.permute(0, 2, 3, 1) * 255).round().numpy(), theirs.data[order])


class Trap:
    def __reduce__(self):
        return print, ("code of a data file ran",)


@pytest.mark.parametrize("hostile", [Trap(), np.array([Trap()], dtype=object), io.StringIO, np.float64])
def test_a_pickle_that_asks_for_code_is_refused(tmp_path, capsys, hostile):
    write_batches(tmp_path, {b"note": hostile})
    with pytest.raises(UserError, match="data_batch_1 is truncated or not one of the official files .*asks for"):
        module(tmp_path, tmp_path).prepare()
    assert "ran" not in capsys.readouterr().out
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_truncated_batch_is_named(tmp_path, length):
    path = write_batches(tmp_path) / "data_batch_3"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UserError, match="data_batch_3 is truncated"):
        module(tmp_path, tmp_path).prepare()
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def test_a_truncated_archive_is_named(tmp_path):
    path = write_archive(tmp_path / "archive")
    path.write_bytes(path.read_bytes()[:20000])
    with pytest.raises(UserError, match=f"{ARCHIVE} is truncated"):
        module(tmp_path, path).prepare()
    path.write_bytes(b"no archive")
    with pytest.raises(UserError, match=f"{ARCHIVE} is truncated or no tar.gz"):
        module(tmp_path, path).prepare()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({b"labels": [0] * 11}, "data_batch_1 is not a CIFAR-10 file"),
        ({b"data": np.zeros((12, 3071), np.uint8)}, "data_batch_1 is not a CIFAR-10 file"),
        ({b"data": np.zeros((12, 3072), np.float32)}, "data_batch_1 is not a CIFAR-10 file"),
        ({b"labels": [0] * 11 + [10]}, "has a label 10, but its 10 classes go from 0 to 9"),
        ({b"labels": [0] * 11 + [-1]}, "has a label -1"),
    ],
)
def test_content_that_is_not_cifar10(tmp_path, changes, message):
    write_batches(tmp_path, changes)
    with pytest.raises(UserError, match=message):
        module(tmp_path, tmp_path).prepare()


def test_files_that_are_missing(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist"):
        module(tmp_path, tmp_path / "nowhere").prepare()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty does not hold CIFAR-10"):
        module(tmp_path, tmp_path / "empty").prepare()
    (write_batches(tmp_path) / "data_batch_5").unlink()
    with pytest.raises(UserError, match="data_batch_5 is missing"):
        module(tmp_path, tmp_path).prepare()


def test_folders_of_other_classes(tmp_path):
    write_tree(tmp_path)
    (tmp_path / "test" / "zebra").mkdir()
    with pytest.raises(UserError, match="zebra holds no images"):
        module(tmp_path, tmp_path).prepare()
    Image.new("RGB", (32, 32)).save(tmp_path / "test" / "zebra" / "1.png")
    with pytest.raises(UserError, match="not CIFAR-10's .*use data=image_folder"):
        module(tmp_path, tmp_path).prepare()


def test_nothing_there_and_nothing_to_be_had(tmp_path):
    dm = CIFAR10DataModule(cache_dir=tmp_path, download_dir=tmp_path / "got", urls=["http://127.0.0.1:9/c.tar.gz"])
    with pytest.raises(UserError, match=r"tried http://127.0.0.1:9/c.tar.gz .*data=digits and data=synthetic"):
        dm.prepare()
