"""A folder, a table, tar shards and parquet files of the same images give the same batches, errors
and colours.

The yaml of each data set states every argument of the class that it builds, and no other.
"""

import inspect
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from augmentations.policies import RandAugment
from lockstep.config.compose import compose, plain
from lockstep.config.instantiate import resolve_target
from lockstep.process.errors import UserError
from sources import MODULES, Encoded, write

CONFIGS = Path(__file__).parents[2] / "configs" / "data"
RNG, MODES = np.random.default_rng(3), ("RGB", "L", "P", "CMYK")


def encoded(image, kind="png"):
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def photographs(counts):
    """Of odd sizes and several modes; counts: {split: images of each class}."""
    for split, count in counts.items():
        for label in ("cat", "dog", "owl"):
            for i in range(count):
                image = Image.fromarray(
                    RNG.integers(0, 256, (*RNG.integers(14, 30, 2), 3), dtype=np.uint8)
                )
                kind = "jpeg" if i % 2 else "png"
                yield Encoded(
                    split, label, f"{i}.{kind}", encoded(image.convert(MODES[i % 4]), kind)
                )


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    images = list(photographs({"train": 9, "val": 2, "test": 3}))
    place = tmp_path_factory.mktemp("sources")
    return {kind: write(kind, place / kind, images) for kind in MODULES}


def module(kind, root, cache, **options):
    options = {
        "image_size": 12,
        "global_batch_size": 9,
        "eval_batch_size": 5,
        "seed": 4,
        "flip": True,
        **options,
    }
    return MODULES[kind](root=root, cache_dir=cache, **options)


def all_bytes(dm):
    dm.attach_to_ranks()
    dm.train_dataloader().set_epoch(1)
    loaders = (dm.train_dataloader(), dm.val_dataloader(), dm.test_dataloader())
    batches = [dm.on_after_batch_transfer(batch, 0) for loader in loaders for batch in loader]
    return [(images.numpy().tobytes(), labels.tolist()) for images, labels in batches]


@pytest.mark.parametrize("kind", ["csv", "webdataset", "parquet"])
@pytest.mark.parametrize("pipeline", [None, RandAugment()], ids=["whole batches", "single images"])
def test_the_batches_are_those_of_the_folder(kind, pipeline, roots, tmp_path):
    def seen(kind, path, workers):
        dm = module(kind, roots[kind], tmp_path / kind, path=path, num_workers=workers)
        dm.set_augmentation(pipeline)
        found = all_bytes(dm)
        assert dm.choose_path()[0] == path and (dm.num_train, dm.num_val, dm.num_test) == (27, 6, 9)
        return found

    expected = seen("image_folder", "loader", 0)
    assert len(expected) == 3 + 2 + 2
    for path, workers in (("loader", 0), ("loader", 2), *([] if pipeline else [("array", 0)])):
        assert seen(kind, path, workers) == expected, (path, workers)


@pytest.mark.parametrize("kind", MODULES)
def test_the_loader_opens_no_image_early(kind, tmp_path):
    """Neither is one decoded: none of these is an image.

    In a tar they are looked at from outside.
    """
    junk = [
        Encoded(split, label, f"{i}.jpg", b"no image %d" % i)
        for split in ("train", "test") for label in ("a", "b") for i in range(9)
    ]  # fmt: skip
    root = write(kind, tmp_path / "root", junk)
    dm = module(kind, root, tmp_path / "cache", path="loader")
    dm.prepare()
    assert (
        (dm.num_train, dm.num_test) == (16, 18)
        and dm.class_names == ["a", "b"]
        and dm.left_out == {}
    )
    dm.attach_to_ranks()
    with pytest.raises(
        UserError,
        match="cannot be decoded .*damaged, repair or remove it. .python src/check_data.py",
    ):
        next(iter(dm.train_dataloader()))


@pytest.mark.parametrize("numbers", [True, False])
def test_all_sources_have_equal_classes_and_hashes(numbers, tmp_path):
    def label(i):
        return str(i) if numbers else f"c{i}"

    images = [Encoded(split, label(i), f"{i}.png", encoded(Image.new("RGB", (8, 8), (i, 0, 0))))
              for split in ("train", "test") for i in range(1, 13)]  # fmt: skip
    found, hashes = {}, set()
    for kind in MODULES:
        dm = module(
            kind,
            write(kind, tmp_path / kind, images),
            tmp_path / "cache",
            val_fraction=0,
            eval_batch_size=12,
        )
        dm.attach_to_ranks()
        ((pixels, labels),) = [
            dm.on_after_batch_transfer(batch, 0) for batch in dm.test_dataloader()
        ]
        order = pixels[:, 0].mean((1, 2)).argsort()
        found[kind] = (dm.class_names, labels[order].tolist())
        hashes.add(dm.data_hash)
    expected = [str(i) for i in range(1, 13)] if numbers else sorted(f"c{i}" for i in range(1, 13))
    assert set(map(str, found.values())) == {
        str((expected, [expected.index(label(i)) for i in range(1, 13)]))
    }
    assert len(hashes) == 1 or not numbers, "a folder has the order of its classes"


@pytest.mark.parametrize(
    "kind", sorted({path.stem for path in CONFIGS.glob("*.yaml")} - {"default", "none"})
)
def test_config_and_class_have_the_same_options(kind):
    stated = plain(compose("train", [f"data={kind}"]))["data"]
    cls = resolve_target(stated.pop("_target_"), "data._target_")
    bases = [
        base for base in cls.__mro__ if base.__module__.startswith(("data.", "lockstep.data."))
    ]
    taken = {name for base in bases for name in inspect.signature(base.__init__).parameters} - {
        "self",
        "options",
    }
    of_files = (
        {"group", "splits", "max_megapixels", "page", "bands"} if kind == "dataset" else set()
    )
    assert taken - of_files == set(stated)
    assert stated["name"] == kind
