"""Balanced sampling: which images an epoch holds, on any ranks, and what it says of them."""

import io
import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kills import weights
from lockstep.config.keys import may_resume_change
from lockstep.data.batches import TrainBatches
from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.data.report import make_report
from lockstep.data.sampling import Sampling
from lockstep.process.errors import UserError
from lockstep.training.build_data import _warn_of_double_correction, build_data
from runs import succeed
from sources import MODULES, Encoded, write

COUNTS = (300, 40, 5)


def sampling(counts=COUNTS, power=1.0, size=None):
    groups = np.repeat(np.arange(len(counts)), counts)
    weights = 1 / np.bincount(groups)[groups] ** power
    return Sampling(1000 + np.arange(len(groups)), groups, weights, size or len(groups))


def draw(seed, epoch, n):
    return np.random.default_rng([seed, epoch]).integers(0, 9, (3, n)), None


def batches(rank=0, world_size=1, accumulate=1, epoch=2, size=24, **options):
    drawn = sampling(**options)
    loader = TrainBatches(
        iter,
        drawn.positions,
        draw,
        global_batch_size=size,
        rank=rank,
        world_size=world_size,
        accumulate_grad_batches=accumulate,
        seed=7,
        sampling=drawn,
    )
    loader.set_epoch(epoch)
    return loader


def positions(selections):
    """Return the positions of the images of several selections, in their order."""
    return np.concatenate([selection.positions for selection in selections])


def groups_of(seen, counts=COUNTS):
    return np.searchsorted(1000 + np.cumsum(counts), seen, side="right")


def test_each_class_is_drawn_equally_often():
    seen = positions(batches())
    assert len(seen) == 345 // 24 * 24 == 336
    assert np.bincount(groups_of(seen)).tolist() == [112, 112, 112]
    # No image of the large class comes twice, and those of a small one equally often.
    _, repeats = np.unique(seen, return_counts=True)
    assert [set(repeats[groups_of(np.unique(seen)) == group]) for group in range(3)] == [
        {1},
        {2, 3},
        {22, 23},
    ]


def test_sqrt_draws_by_the_root_of_the_images():
    expected = 336 * np.sqrt(COUNTS) / np.sqrt(COUNTS).sum()
    drawn = np.bincount(groups_of(positions(batches(power=0.5))))
    assert (np.abs(drawn - expected) < 1).all() and drawn.tolist() == sorted(drawn)[::-1]


def test_images_differ_between_epochs_and_are_mixed_within_one():
    first = positions(batches(epoch=0))
    assert set(first) != set(positions(batches(epoch=1)))
    assert np.array_equal(first, positions(batches(epoch=0)))
    halves = [np.bincount(groups_of(half), minlength=3) for half in np.split(first, 2)]
    assert np.min(halves) > 30


@pytest.mark.parametrize(("world_size", "accumulate"), [(2, 1), (1, 3), (2, 2), (3, 2)])
def test_ranks_and_accumulation_draw_the_same_images(world_size, accumulate):
    ranks = [list(batches(rank, world_size, accumulate)) for rank in range(world_size)]
    in_order = itertools.chain.from_iterable(zip(*ranks, strict=True))
    assert np.array_equal(positions(in_order), positions(batches()))


def test_a_resume_in_mid_epoch_continues_its_images():
    saved = batches(accumulate=2)
    reading = iter(saved)
    for _ in range(10):
        next(reading)
    resumed = [batches(rank, world_size=2, epoch=0) for rank in range(2)]
    for loader in resumed:
        loader.load_state_dict(saved.state_dict())
    parts = itertools.chain.from_iterable(zip(*resumed, strict=True))
    assert np.array_equal(positions(parts), positions(batches())[5 * 24 :])


@pytest.mark.parametrize("size", [48, 1000])
def test_an_epoch_of_another_length_takes_each_image_equally_often(size):
    drawn = sampling(power=0.0, size=size).draw(np.random.default_rng(0), size)
    repeats = np.bincount(drawn - 1000, minlength=345)
    assert len(drawn) == size and repeats.max() - repeats.min() == 1


class Colours(ImageDataModule):
    """Images of one grey level each, with the targets that a test gives."""

    channels = 1

    def __init__(self, *, targets, names=("a", "b", "c"), **options):
        super().__init__(**{"image_size": 4, "global_batch_size": 10, "val_fraction": 0, **options})
        self.targets = np.asarray(targets)
        self.names = list(names)

    def read(self):
        count = len(self.targets)
        images = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(4, 1).repeat(4, 2)
        return ImageSet(images, self.targets, self.names, num_test=10)


CLASSES = np.repeat([0, 1, 2, 0], [60, 20, 10, 10])


def drawn_by(dm):
    dm.attach_to_ranks()
    return positions([selection for selection in dm.train_dataloader()._selections(0)])


def test_the_note_says_what_an_epoch_holds():
    dm = Colours(targets=CLASSES, sampling="balanced")
    assert np.bincount(CLASSES[drawn_by(dm)]).tolist() == [30, 30, 30]
    note = "balanced: 3 classes: 60, 20, 10 images; 30 draws of each"
    assert dm.sampling_note == note and make_report(dm).fields["sampling"] == note
    dm = Colours(targets=CLASSES, sampling="sqrt", epoch_size=300)
    assert len(drawn_by(dm)) == 300 and dm.steps_per_epoch == 30
    assert dm.sampling_note == "sqrt: 3 classes: 60, 20, 10 images; 151, 87, 62 draws"
    dm = Colours(targets=CLASSES, epoch_size=45)
    assert len(set(drawn_by(dm))) == 40 and "45: 3 classes" in dm.sampling_note


def test_validation_and_test_stay_as_they_are():
    plain = Colours(targets=CLASSES, num_val=12)
    balanced = Colours(targets=CLASSES, num_val=12, sampling="balanced")
    for dm in (plain, balanced):
        dm.attach_to_ranks()
    for name in ("val_dataloader", "test_dataloader"):
        expected, seen = (
            positions(getattr(dm, name)()._selections).tolist() for dm in (plain, balanced)
        )
        assert seen == expected


def test_several_labels_count_by_the_rarest():
    # 60 images have a; 20 of them also b; 10 others have none, and 10 test.
    labels = np.zeros((80, 2))
    labels[:60, 0] = 1
    labels[:20, 1] = 1
    dm = Colours(targets=labels, names="ab", sampling="balanced", global_batch_size=7)
    seen = drawn_by(dm)
    groups = np.select([seen < 20, seen < 60], [1, 0], 2)
    assert np.bincount(groups).tolist() == [23, 24, 23] or np.ptp(np.bincount(groups)) <= 1
    assert "3 groups of images by their rarest label: 40, 20, 10 images" in dm.sampling_note


@pytest.mark.parametrize(
    ("targets", "sampling", "said"),
    [
        (np.linspace(0, 1, 100), "balanced", "of the kind number"),
        (np.zeros((100, 4, 4), int), "sqrt", "of the kind mask"),
        (CLASSES, "balance", "give balanced or sqrt"),
    ],
)
def test_sampling_that_cannot_work_is_refused(targets, sampling, said):
    names = () if targets.dtype.kind == "f" else ("a", "b", "c")
    with pytest.raises(UserError, match=said):
        Colours(targets=targets, names=names, sampling=sampling).prepare()


def images_of(counts):
    colours = np.random.default_rng(0).integers(0, 256, (sum(counts.values()), 6, 6, 3), np.uint8)
    names = [(label, i) for label, count in counts.items() for i in range(count)]
    for pixels, (label, i) in zip(colours, names, strict=True):
        for split in ("train", "test") if i < 2 else ("train",):
            file = io.BytesIO()
            Image.fromarray(255 - pixels if split == "test" else pixels).save(file, "png")
            yield Encoded(split, label, f"{i}.png", file.getvalue())


def listed(kind, place, world_size=1, rank=0, accumulate=1, **options):
    root = place / "list.csv" if kind == "csv" else place
    options = {
        "sampling": "balanced",
        "image_size": 6,
        "global_batch_size": 8,
        "val_fraction": 0,
        "seed": 3,
        "cache_dir": place.parent / f"{kind}-cache",
        **options,
    }
    dm = MODULES[kind](root=root, **options)
    dm.attach_to_ranks(rank=rank, world_size=world_size, accumulate_grad_batches=accumulate)
    return dm


def to_array(modules):
    """Return the images of an epoch, micro-batch after micro-batch, rank after rank."""
    ranks = [
        map(partial(dm.on_after_batch_transfer, dataloader_idx=0), dm.train_dataloader())
        for dm in modules
    ]
    batches = itertools.chain.from_iterable(zip(*ranks, strict=True))
    images = torch.cat([images for images, _ in batches])
    return [image.tobytes() for image in images.numpy()]


@pytest.mark.parametrize("kind", MODULES)
def test_every_source_draws_the_same_balanced_pixels(kind, tmp_path):
    images = list(images_of({"cat": 20, "dog": 4}))
    expected = to_array([listed("csv", write("csv", tmp_path / "one", images).parent)])
    place = tmp_path / kind
    write(kind, place, images)
    assert len(expected) == 24 and len(set(expected)) < 24
    assert to_array([listed(kind, place)]) == expected
    ranks = [listed(kind, place, 2, rank, 2, path="loader", num_workers=1) for rank in range(2)]
    assert to_array(ranks) == expected


def table(place, weights):
    """Write a CSV of ten images to train on and two to test, with a column of weights."""
    lines = ["path,label,split,weight"]
    for i, weight in enumerate([*weights, 1, 1]):
        Image.fromarray(np.full((6, 6, 3), 9 * i, np.uint8)).save(place / f"{i}.png")
        split = "train" if i < len(weights) else "test"
        lines.append(f"{i}.png,{'cat' if i % 2 else 'dog'},{split},{weight}")
    (place / "list.csv").write_text("\n".join(lines))
    return place


def test_weights_say_how_often_an_image_is_drawn(tmp_path):
    place = table(tmp_path, [0, 1, 2, 5])
    dm = listed("csv", place, sampling="weight", epoch_size=16)
    assert np.bincount(drawn_by(dm), minlength=4).tolist() == [0, 2, 4, 10]
    assert dm.sampling_note == "by the column weight: 2 classes: 2, 1 images; 12, 4 draws"
    other = listed("csv", table(tmp_path, [0, 1, 2, 4]), sampling="weight", epoch_size=16)
    assert other.data_hash != dm.data_hash


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_an_evaluation_needs_no_weights(kind, tmp_path):
    place = tmp_path / kind
    write(kind, place, list(images_of({"cat": 4, "dog": 4})))
    root = place / "list.csv" if kind == "csv" else place
    dm = MODULES[kind](root=root, image_size=6, sampling="weight", cache_dir=tmp_path / "cache")
    dm.stage = "test"
    dm.prepare()
    assert dm.num_test == 4 and dm.source.columns == {}


@pytest.mark.parametrize(
    ("weights", "column", "said"),
    [
        ([1, 1, -1, 1], "weight", r"2.png \(line 4\): the weight in the column weight is -1"),
        ([1, 1, "much", 1], "weight", r"the column weight is much, .*line 4"),
        ([1, 1, "", 1], "weight", r"the column weight is empty, .*line 4"),
        ([0, 0, 0, 0], "weight", "all training images are 0"),
        ([1, 1, 1, 1], "wieght", "no column wieght: .*data.sampling=COLUMN"),
    ],
)
def test_a_column_without_usable_weights_is_refused(weights, column, said, tmp_path):
    with pytest.raises(UserError, match=said):
        listed("csv", table(tmp_path, weights), sampling=column, global_batch_size=2)


def test_a_parquet_file_has_weights_too(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    images = list(images_of({"cat": 4, "dog": 4}))
    place = write("parquet", tmp_path / "parquet", images)
    for path in place.glob("data/train*"):
        rows = parquet.read_table(path)
        weights = pa.array([0, 0, 0, 0, 1, 1, 1, 3])
        parquet.write_table(rows.append_column("weight", weights), path)
    for path in place.glob("data/test*"):
        rows = parquet.read_table(path)
        parquet.write_table(rows.append_column("weight", pa.array([1.0] * len(rows))), path)
    dm = listed("parquet", place, sampling="weight", epoch_size=12, global_batch_size=6)
    assert np.bincount(drawn_by(dm)).tolist() == [0, 0, 0, 0, 2, 2, 2, 6]


@pytest.mark.slow
def test_a_stopped_run_resumes_to_equal_weights(tmp_path):
    options = [
        "data=synthetic", "data.num_images=300", "data.num_classes=3", "data.num_test_images=30",
        "data.image_size=8", "data.global_batch_size=24", "data.sampling=sqrt", "scheduler=none",
        "data.epoch_size=200", "trainer.precision=64-true", "model.dropout=0",
        "model.head_dropout=0", "trainer.sync_batchnorm=true", "~callbacks.hardware", "test=false", "run_id=r",
    ]  # fmt: skip
    whole = succeed("train", *options, "trainer.max_steps=12", logs=tmp_path / "whole")
    note = "sqrt: 3 classes: 93, 88, 89 images; 65, 63, 64 draws"
    assert f"sampling: {note}" in whole.output
    assert f"| sampling | {note} |" in (whole.folder.path / "page.md").read_text()
    assert whole.record["left_out_per_epoch"] == 0

    logs = tmp_path / "stopped"
    succeed("train", *options, "trainer.max_steps=5", logs=logs)
    done = succeed("train", "resume=r", "trainer=ddp_sim", "trainer.max_steps=12", logs=logs)
    expected = weights(whole.folder)
    for name, tensor in weights(done.folder).items():
        assert torch.allclose(tensor, expected[name], rtol=1e-9, atol=1e-12), name


def test_a_resume_keeps_its_sampling():
    assert not may_resume_change("data.sampling") and not may_resume_change("data.epoch_size")


@pytest.mark.parametrize(
    ("weights", "sampling"), [("auto", "sqrt"), ("auto", None), (None, "sqrt")]
)
def test_class_weights_beside_sampling_are_warned_of(weights, sampling, caplog):
    _warn_of_double_correction({"loss": {"class_weights": weights}, "data": {"sampling": sampling}})
    assert ("both correct for" in caplog.text) == bool(weights and sampling)


def test_a_module_with_its_own_loaders_cannot_be_sampled():
    run = SimpleNamespace(
        config={"data": {"sampling": "balanced"}}, cluster=None, choices={"data": "none"}
    )
    with pytest.raises(UserError, match="data.sampling=balanced is an option of Lockstep's"):
        build_data(run, {}, is_training=True)
