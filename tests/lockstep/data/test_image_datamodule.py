"""The data module as Lightning drives it: facts, shares of ranks, resume in mid-epoch, short
runs.
"""

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from data.digits import DigitsDataModule
from data.synthetic import SyntheticDataModule
from lockstep.checkpoints.resume_point import TRAINING, VALIDATION, ResumePoint, loop_state
from lockstep.data.augmentation import CropFlip
from lockstep.data.decoding import CorruptImage
from lockstep.data.image_datamodule import ImageDataModule, ImageSet
from lockstep.data.report import (
    Finding,
    FindingKind,
    find_identical_images,
    log_findings,
    write_findings,
)
from lockstep.process.errors import UserError

OPTIONS = {
    "num_images": 220, "num_test_images": 197, "num_classes": 7, "image_size": 12, "crop_padding": 2, "flip": True,
    "num_val": 23, "global_batch_size": 32, "eval_batch_size": 20, "seed": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def make(cache):
    def make(**options):
        return SyntheticDataModule(cache_dir=cache, **{**OPTIONS, **options})

    return make


def prepared(dm):
    dm.prepare()
    return dm


def test_facts(make):
    dm = prepared(make())
    assert (dm.num_train, dm.num_val, dm.num_test) == (197, 23, 197)
    assert (dm.num_classes, dm.channels, dm.image_size) == (7, 3, 12)
    assert (
        dm.class_names == [f"pattern {i}" for i in range(7)]
        and dm.mean == [0.5] * 3
        and dm.std == [0.18] * 3
    )
    assert len(dm.data_hash) == 64 and dm.data_hash != prepared(make(num_images=221)).data_hash
    assert (
        dm.data_hash == prepared(make(flip=False, seed=9)).data_hash
    )  # of the images, not of what is done with them


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"global_batch_size": 198},
            "global_batch_size=198, but synthetic has 197 training images",
        ),
        ({"eval_batch_size": 0}, "eval_batch_size=0"),
        (
            {"mean": [0.5, 0.5]},
            "data.mean=.* must be auto, a number, or one for each of 3 channels",
        ),
        ({"num_classes": 1}, "num_classes=1 must be at least 2"),
        ({"crop_pct": 1.1}, "data.crop_pct=1.1 must be auto, or above 0"),
        ({"std": 0}, "must be positive"),
        ({"seed": -1}, "seed=-1"),
        ({"path": "disk"}, "data.path=disk must be one of auto, array, loader"),
        ({"num_workers": -1}, "data.num_workers=-1 must be auto or at least 0"),
    ],
)
def test_bad_options_end_before_training(make, options, message):
    with pytest.raises(UserError, match=message):
        make(**options).prepare()


class Recorder(LightningModule):
    """A linear model that knows nothing of these data modules, and remembers a fingerprint of each
    image it saw.
    """

    def __init__(self):
        super().__init__()
        self.net = torch.nn.LazyLinear(7)
        self.seen, self.counted = [], 0

    def training_step(self, batch, batch_idx):
        images, self.targets = batch
        self.seen.append((self.current_epoch, *images.double().sum((1, 2, 3)).tolist()))
        return torch.nn.functional.cross_entropy(self.net(images.flatten(1)), self.targets)

    def test_step(self, batch, batch_idx):
        self.counted += len(batch[1])
        self.dtype_seen = batch[0].dtype

    validation_step = test_step

    def on_load_checkpoint(self, checkpoint):
        loops = checkpoint["loops"]
        loader = loops["fit_loop"]["state_dict"]["combined_loader"][0]
        phase = VALIDATION if loader["global_batches"] == loader["steps_per_epoch"] else TRAINING
        is_last = phase == VALIDATION
        point = ResumePoint(loader["epoch"], loader["global_batches"], phase, is_last=is_last)
        loops["fit_loop"] = loop_state(
            loops["fit_loop"], point, self.trainer.accumulate_grad_batches
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class SaveAt(Callback):
    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


def run(tmp_path, dm, method="fit", ckpt_path=None, **options):
    torch.manual_seed(0)
    module = Recorder()
    module.net(torch.zeros(1, dm.channels * dm.image_size**2))
    with warnings.catch_warnings():  # Lightning's advice on its own and its dependencies' habits
        warnings.simplefilter("ignore")
        trainer = Trainer(
            **{"accelerator": "cpu", "devices": 1, "max_epochs": 2, "logger": False, "enable_checkpointing": False,
               "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path, **options}
        )  # fmt: skip
        getattr(trainer, method)(module, datamodule=dm, ckpt_path=ckpt_path)
    return module


def steps(module, accumulate=1):
    """Per optimizer step: the epoch and the set of images."""
    merged = [module.seen[i : i + accumulate] for i in range(0, len(module.seen), accumulate)]
    return [(group[0][0], tuple(x for micro in group for x in micro[1:])) for group in merged]


@pytest.mark.parametrize(("at", "saved_with", "resumed_with"), [(6, 2, 2), (7, 1, 4)])
def test_a_real_trainer_goes_on_in_mid_epoch(make, tmp_path, at, saved_with, resumed_with):
    whole = run(
        tmp_path,
        make(),
        accumulate_grad_batches=saved_with,
        callbacks=[SaveAt(tmp_path / "c.ckpt", at)],
    )
    resumed = run(
        tmp_path, make(), ckpt_path=tmp_path / "c.ckpt", accumulate_grad_batches=resumed_with
    )
    assert [epoch for epoch, _ in steps(whole, saved_with)] == [0] * 6 + [1] * 6
    assert steps(resumed, resumed_with) == steps(whole, saved_with)[at:]
    assert resumed.trainer.global_step == 12
    assert (
        resumed.counted == (2 if at <= 6 else 1) * 23
    )  # the validation after step 6 was still to come
    if saved_with == resumed_with:
        assert torch.equal(resumed.net.weight, whole.net.weight)


def test_mixing_ends_after_its_epochs_and_needs_pairs(make, tmp_path):
    dm = make()
    dm.set_augmentation(CropFlip(mixup_alpha=1.0, mix_epochs=1))
    assert run(tmp_path, dm, max_epochs=1).targets.shape == (32, 7)
    assert run(tmp_path, dm, max_epochs=2).targets.shape == (32,)
    dm.attach_to_ranks(world_size=32)
    with pytest.raises(UserError, match="global_batch_size=32 gives each device 1 at a time"):
        dm.train_dataloader()


def test_testing_alone_counts_all_and_true_precision_reaches_the_batch(make, tmp_path):
    module = run(tmp_path, make(), "test", precision="64-true")
    assert module.counted == 197 and module.dtype_seen == torch.float64


def test_sample_images_are_the_first_training_images_without_augmentation(tmp_path):
    samples = []
    for rank, world_size in ((0, 1), (1, 2)):
        dm = DigitsDataModule(cache_dir=str(tmp_path), global_batch_size=64, eval_batch_size=50)
        dm.attach_to_ranks(rank=rank, world_size=world_size)
        samples.append(dm.sample_images(120))
    assert samples[0].shape == (120, 1, 8, 8) and torch.equal(samples[0], samples[1])
    assert abs(float(samples[0].mean())) < 0.1 and abs(float(samples[0].std()) - 1) < 0.1


class Own(ImageDataModule):
    """As docs/data.md shows: nothing but `read`."""

    channels = 1

    def read(self):
        images = np.full((40, 4, 4, 1), 7, np.uint8)
        images[3:5] = [[[[1]]], [[[1]]]]
        return ImageSet(images, np.arange(40) % 2, ["a", "b"], num_test=4)


def test_a_users_data_set_needs_no_name_and_cache(tmp_path):
    dm = Own(image_size=4, global_batch_size=4, cache_dir=tmp_path)
    assert dm.name == "own"
    run(tmp_path / "logs", dm, max_epochs=1)
    assert (dm.num_train, dm.num_val, dm.num_test) == (32, 4, 4) and not list(tmp_path.iterdir())
    pairs = ["image 0 = image 1", "image 3 = image 4"]
    finding = Finding(FindingKind.TWO_LABELS, "2 images occur under two labels", pairs)
    assert finding in find_identical_images(dm)
    alone = Own(image_size=4, global_batch_size=4)  # its loaders, without a Trainer
    assert [
        len(list(getattr(alone, f"{name}_dataloader")())) for name in ("train", "val", "test")
    ] == [8, 1, 1]


def test_pixels_from_0_to_1_are_no_bytes():
    with pytest.raises(UserError, match="images are float32, and ImageSet takes uint8"):
        ImageSet(np.zeros((3, 4, 4, 1), np.float32), np.arange(3) % 2, ["a", "b"], num_test=1)


def test_a_test_split_is_tested_where_no_validation_fits():
    own = Own(image_size=4, num_val=500)
    own.stage = "test"
    own.prepare()
    assert own.splits.test.tolist() == [36, 37, 38, 39] and not own.splits.drew_test


def test_an_unreadable_image_hides_no_equal_ones(tmp_path, monkeypatch):
    dm = Own(image_size=4, global_batch_size=4, cache_dir=tmp_path)
    run(tmp_path / "logs", dm, max_epochs=1)
    read = dm.source.read_bytes

    def read_but_one(position):
        if position == 7:
            raise CorruptImage("image 7 cannot be read")
        return read(position)

    monkeypatch.setattr(dm.source, "read_bytes", read_but_one)
    pairs = ["image 0 = image 1", "image 3 = image 4"]
    finding = Finding(FindingKind.TWO_LABELS, "2 images occur under two labels", pairs)
    assert finding in find_identical_images(dm)


def test_numbers_of_equal_images_differ_in_their_seventh_digit():
    numbers = np.float32([123456.1, 123456.4, 5])
    source = ImageSet(np.zeros((3, 4, 4, 1), np.uint8), numbers, [], num_test=1)
    assert [source.target_name(i) for i in range(3)] == ["123456.1", "123456.4", "5"]


def test_without_names_no_file_is_named(tmp_path, caplog):
    finding = Finding(FindingKind.NOT_COMPARED, "not compared", [])
    write_findings(tmp_path, [finding])
    log_findings([finding])
    assert caplog.messages == ["not compared."] and not list(tmp_path.iterdir())


def test_labels_follow_the_classes_of_a_checkpoint(make):
    dm = make()
    dm.stage = "test"
    before = prepared(dm).source.classes.copy()
    names = ["new", *reversed(dm.class_names)]
    dm.match_classes(names)
    assert (
        dm.class_names == names
        and dm.num_classes == 8
        and np.array_equal(dm.source.classes, 7 - before)
    )
    with pytest.raises(
        UserError, match="has the class pattern 6, which the checkpoint does not know; it knows new"
    ):
        dm.match_classes(names[:1] + names[2:])
    dm.test_on_all()
    assert (dm.num_train, dm.num_val, dm.num_test) == (0, 0, 417)
