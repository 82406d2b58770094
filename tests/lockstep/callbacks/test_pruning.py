"""When a trial reports, and when its training ends."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.pruning import Pruning
from lockstep.callbacks.training_log import ValidationInterval
from lockstep.checkpoints.files import newest_whole
from lockstep.training.trainer import validation_interval
from plain_task import Small, fit


class Losing(Small):
    def validation_step(self, batch, batch_idx):
        self.log("val/acc", 1 / max(1, self.trainer.global_step))


def train(gives_up_at, *callbacks, **options):
    reports = []

    def report(number, value):
        reports.append((number, round(1 / value)))
        return number == gives_up_at

    callback = Pruning(SimpleNamespace(report=report, number=3, pruner="median"), "val/acc")
    loader = DataLoader(torch.ones(4, 2))
    options = {"max_epochs": 3, **options}
    trainer = fit(Losing(), *callbacks, callback, val_loader=loader, **options)
    return trainer, callback, reports


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [(1, 4), (2, 8), (3, 12)]),
        ({"val_check_interval": 2}, [(1, 2), (2, 4), (3, 6), (4, 8), (5, 10), (6, 12)]),
        ({"val_check_interval": 3}, [(1, 3), (2, 7), (3, 11)]),
        ({"check_val_every_n_epoch": 2, "max_epochs": 4}, [(1, 8), (2, 16)]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 5}, [(1, 5), (2, 10)]),
    ],
)
def test_validations_are_numbered_from_one(options, expected):
    _, callback, reports = train(None, **options)
    assert reports == expected and callback.record_fields() == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("batches", "options", "steps"),
    [
        (8, {}, [2, 4, 6, 8, 10, 12, 14, 16]),
        (10, {}, [3, 6, 9, 10, 13, 16, 19, 20]),
        (10, {"check_val_every_n_epoch": 2, "max_epochs": 4}, [13, 16, 19, 20, 33, 36, 39, 40]),
        (10, {"check_val_every_n_epoch": None}, [3, 6, 9, 10, 12, 15, 18, 20]),
    ],
)
def test_validations_at_an_interval_and_epochs_end_are_numbered(batches, options, steps):
    """As build_trainer passes trainer.val_check_interval=0.25 on."""
    interval = validation_interval(0.25, batches, 1)
    options = {"max_epochs": 2, "batches": batches, "val_check_interval": interval, **options}
    _, _, reports = train(None, ValidationInterval(interval), **options)
    assert reports == list(enumerate(steps, start=1))


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_training_goes_on_with_the_numbers(tmp_path):
    options = {"batches": 10, "val_check_interval": 3, "max_epochs": 2}
    callbacks = ValidationInterval(3), Checkpoints(tmp_path)
    train(None, *callbacks, max_steps=14, **options)
    path = newest_whole(tmp_path, "last")
    _, _, reports = train(None, *callbacks, ckpt_path=path, **options)
    assert reports == [(6, 16), (7, 19), (8, 20)]


@pytest.mark.filterwarnings("ignore")
def test_validations_by_the_clock_are_reported():
    options = {"check_val_every_n_epoch": None, "val_check_interval": "00:00:00:00"}
    _, _, reports = train(None, **options)
    assert (3, 12) in reports


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(4, 2))


@pytest.mark.filterwarnings("ignore")
def test_validations_of_a_stream_have_growing_numbers():
    _, _, reports = train(None, data=Stream(), val_check_interval=2)
    assert [number for number, _ in reports] == [1, 2, 3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore")
def test_a_pruned_training_ends_with_its_validation():
    trainer, callback, reports = train(2, val_check_interval=2)
    assert trainer.global_step == 4 and len(reports) == 2
    assert callback.record_fields() == {"ended_by": "pruned"}


@pytest.mark.filterwarnings("ignore")
def test_a_training_is_not_pruned_at_its_end():
    trainer, callback, _ = train(3)
    assert trainer.global_step == 12 and not callback.is_pruned


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [OSError, KeyError, ValueError])
def test_a_journal_that_is_gone_ends_no_training(kind, caplog):
    def report(number, value):
        raise kind("no room")

    trial = SimpleNamespace(report=report, number=3, pruner="median", journal="a.journal")
    loader = DataLoader(torch.ones(1, 2))
    trainer = fit(Losing(), Pruning(trial, "val/acc"), val_loader=loader, max_epochs=1)
    assert trainer.global_step > 0 and "a.journal cannot be used:" in caplog.text
    assert "no room" in caplog.text
