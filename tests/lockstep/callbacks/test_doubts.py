"""A training warns once of what it most probably does not intend, and of nothing else."""

import itertools
import logging

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from lockstep.callbacks import doubts
from lockstep.callbacks.doubts import Doubts
from lockstep.data.image_datamodule import ImageDataModule
from lockstep.data.source import ImageSet
from plain_task import Numbers, Regression, Small
from projects.gan import GAN
from projects.gan import Images as ImagesOfGAN

pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = torch.ones(10, 2)


@pytest.fixture
def warnings_of(caplog):
    """Return a function that fits a module with `Doubts` and returns its warnings."""

    def run(module, loader=None, val_loader=None, *callbacks, **options):
        caplog.clear()
        caplog.set_level(logging.WARNING, "lockstep.callbacks.doubts")
        off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=[*callbacks, Doubts()],
            **{"max_epochs": 2, **dict.fromkeys(off, False), **options},
        )
        if loader is None:
            loader = shuffled()
        trainer.fit(module, loader, val_loader)
        return [r.getMessage() for r in caplog.records if r.name == "lockstep.callbacks.doubts"]

    return run


def shuffled():
    return DataLoader(ROWS, 4, shuffle=True)


class OfSeveral(Small):
    """It takes batches of one loader and of several."""

    def training_step(self, batch, batch_idx):
        return self.layer(torch.cat(batch) if isinstance(batch, list) else batch).sum()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.layer(batch)


class Forgotten(Small):
    """Four parameters that no optimizer has."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


def test_parameters_in_no_optimizer_are_counted_and_named(warnings_of):
    [warning] = warnings_of(Forgotten())
    assert warning.startswith("4 parameters require a gradient but are in no optimizer")
    assert "(encoder.0.weight, encoder.0.bias, encoder.1.weight, …)" in warning


class UnfreezeLate(pl.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.encoder.requires_grad_(trainer.current_epoch == 1)


def test_layers_unfrozen_without_an_optimizer_are_named(warnings_of):
    [warning] = warnings_of(Forgotten(), None, None, UnfreezeLate())
    assert "encoder.0.weight" in warning
    assert warnings_of(Forgotten(), None, None, UnfreezeLate(), max_epochs=1) == []


class Distributed(DistributedSampler):
    """A sampler of the user's own."""


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ROWS)


def distributed(sampler_class, **options):
    return sampler_class(ROWS, num_replicas=1, rank=0, **options)


class InTurn(SequentialSampler):
    """A sampler of the user's own."""


@pytest.mark.parametrize(
    ("make", "warns"),
    [
        (lambda: DataLoader(ROWS, 4), True),
        (lambda: [shuffled(), DataLoader(ROWS, 4)], True),
        (lambda: DataLoader(ROWS, 4, sampler=distributed(DistributedSampler, shuffle=False)), True),
        (lambda: DataLoader(ROWS, 4, sampler=distributed(DistributedSampler)), False),
        (lambda: DataLoader(ROWS, 4, sampler=distributed(Distributed, shuffle=False)), False),
        (lambda: DataLoader(ROWS, 4, sampler=InTurn(ROWS)), False),
        (lambda: DataLoader(ROWS, 16), False),
        (lambda: DataLoader(Stream(), 4), False),
        (shuffled, False),
    ],
    ids=[
        "sequential",
        "one_of_two",
        "distributed",
        "distributed_shuffled",
        "own_distributed",
        "own_sampler",
        "one_batch",
        "stream",
        "shuffled",
    ],
)
def test_a_training_loader_that_does_not_shuffle(make, warns, warnings_of):
    warnings = warnings_of(OfSeveral(), make())
    assert len(warnings) == warns
    assert all("does not shuffle" in warning for warning in warnings)


@pytest.mark.parametrize("options", [{"overfit_batches": 2}, {"fast_dev_run": True}])
def test_a_rehearsal_voices_no_doubt(options, warnings_of):
    val = DataLoader(ROWS, 4, drop_last=True)
    assert warnings_of(OfSeveral(), DataLoader(ROWS, 4), val, **options) == []


@pytest.mark.parametrize(
    ("loader", "options", "samples"),
    [
        (DataLoader(ROWS, 4, drop_last=True), {}, 2),
        ([DataLoader(ROWS, 4, drop_last=True), DataLoader(ROWS, 16, drop_last=True)], {}, 12),
        (DataLoader(ROWS, 4, drop_last=True), {"limit_val_batches": 1}, None),
        (DataLoader(ROWS, 5, drop_last=True), {}, None),
        (DataLoader(ROWS, 4), {}, None),
    ],
)
def test_an_evaluation_that_drops_samples(loader, options, samples, warnings_of):
    warnings = warnings_of(OfSeveral(), None, loader, **options)
    if samples is None:
        assert warnings == []
    else:
        [warning] = warnings
        assert f"drops {samples} samples" in warning


def test_a_test_that_drops_samples(caplog):
    data = Numbers(rows=160)
    data.test_dataloader = lambda: DataLoader(data.parts[1], 20, drop_last=True)
    trainer = pl.Trainer(accelerator="cpu", callbacks=[Doubts()], logger=False)
    trainer.test(Regression(), datamodule=data, verbose=False)
    assert "test loader has drop_last=True and drops 12 samples" in caplog.text


class UncountedSteps(Small):
    """It steps its optimizer where Lightning does not count."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.layer(batch).sum().backward()
        optimizer.step()


def test_a_training_without_counted_steps_cannot_be_resumed(warnings_of):
    [warning] = warnings_of(UncountedSteps())
    assert "No optimizer step was counted in the first epoch" in warning


def test_a_gan_with_two_optimizers_raises_no_doubt(caplog):
    fit_project(GAN(), ImagesOfGAN())
    assert "doubts" not in {record.name.rpartition(".")[2] for record in caplog.records}


def fit_project(module, data):
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = dict.fromkeys(off, False)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[Doubts()], **options)
    trainer.fit(module, datamodule=data)


class Endless(torch.utils.data.Sampler):
    """A sampler without a length."""

    def __iter__(self):
        return itertools.cycle(range(len(ROWS)))


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_sampler_without_a_length_trains(drop_last, warnings_of):
    loader = DataLoader(ROWS, 4, sampler=Endless(), drop_last=drop_last)
    assert warnings_of(Small(), loader, max_steps=3, max_epochs=-1) == []


@pytest.mark.parametrize(
    ("loader", "others", "warns"),
    [
        (DataLoader(Stream(), 4), [[1.0] * 8], True),
        (DataLoader(Stream(), 4), [[2.0] * 8], False),
        (DataLoader(ROWS, 4, shuffle=True), [[1.0] * 8], False),
    ],
    ids=["the same", "its own share", "a sampler"],
)
def test_ranks_that_read_the_same_stream(loader, others, warns, warnings_of, monkeypatch):
    monkeypatch.setattr(doubts, "has_ranks", lambda: True)
    monkeypatch.setattr(doubts, "gather_objects", lambda values: [values, others])
    warnings = warnings_of(Small(), loader)
    assert any("Ranks train on the same samples" in warning for warning in warnings) == warns


class ClassByClass(ImageDataModule):
    """Images of two classes, of which those to validate come as folders list them."""

    channels = 1

    def read(self):
        labels = np.array([0, 1, 0, 1, *[0] * 8, *[1] * 8, 0, 1])
        return ImageSet(np.zeros((22, 4, 4, 1), np.uint8), labels, ["a", "b"], 2, 16)


class OfClasses(Small):
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0].flatten(1)[:, :2]).sum()

    def validation_step(self, batch, batch_idx):
        self.layer(batch[0].flatten(1)[:, :2])


@pytest.mark.parametrize(("limit", "warns"), [(1, True), (0.5, True), (3, False), (1.0, False)])
def test_a_limit_that_ends_before_the_last_classes(limit, warns, caplog):
    data = ClassByClass(image_size=4, global_batch_size=4, eval_batch_size=4)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {**dict.fromkeys(off, False), "limit_val_batches": limit}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, callbacks=[Doubts()], **options)
    trainer.fit(OfClasses(), datamodule=data)
    assert caplog.text.count("images, which are of 1 of 2 classes") == warns
