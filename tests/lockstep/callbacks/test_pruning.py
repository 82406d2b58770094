"""When a trial reports, and when its training ends."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.callbacks.pruning import Pruning
from plain_task import Small, fit


class Losing(Small):
    def validation_step(self, batch, batch_idx):
        self.log("val/acc", 1 / max(1, self.trainer.global_step))


def train(gives_up_at, **options):
    reports = []

    def report(number, value):
        reports.append((number, round(1 / value)))
        return number == gives_up_at

    callback = Pruning(SimpleNamespace(report=report, number=3, pruner="median"), "val/acc")
    loader = DataLoader(torch.ones(4, 2))
    options = {"max_epochs": 3, **options}
    trainer = fit(Losing(), callback, val_loader=loader, **options)
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
