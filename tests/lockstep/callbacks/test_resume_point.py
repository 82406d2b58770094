"""Lightning's loop state, made from a place in plain words."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.callbacks.resume_point import EPOCH_END, TRAINING, VALIDATION, ends_step, is_validation_epoch, loop_state
from plain_task import Small, fit

SAVED = {"state_dict": {}, "epoch_loop.automatic_optimization.optim_progress": {"kept": 1}}


def counts(part):
    assert part["total"] == part["current"]
    return tuple(part["current"][name] for name in ("ready", "started", "processed", "completed"))


def state(phase, done, accumulate=1, epoch=2):
    return loop_state(
        SAVED, {"epoch": epoch, "batches_done": done, "batches_per_epoch": 20, "phase": phase}, accumulate
    )


@pytest.mark.parametrize(
    ("phase", "done", "accumulate", "epochs", "batches", "validation", "is_last"),
    [
        (TRAINING, 7, 1, (3, 3, 2, 2), (7, 7, 7, 6), (0, 0, 0, 0), False),
        (TRAINING, 7, 4, (3, 3, 2, 2), (28, 28, 28, 27), (0, 0, 0, 0), False),  # micro-batches of the new accumulation
        (VALIDATION, 20, 1, (3, 3, 2, 2), (20, 20, 20, 20), (1, 1, 0, 0), True),  # starts again from its first batch
        (VALIDATION, 8, 2, (3, 3, 2, 2), (16, 16, 16, 16), (1, 1, 0, 0), False),  # within an epoch, which goes on
        (EPOCH_END, 20, 1, (3, 3, 3, 3), (0, 0, 0, 0), (0, 0, 0, 0), False),  # the next epoch begins
    ],
)
def test_loop_state_of_each_phase(phase, done, accumulate, epochs, batches, validation, is_last):
    found = state(phase, done, accumulate)
    assert counts(found["epoch_progress"]) == epochs
    assert counts(found["epoch_loop.batch_progress"]) == batches
    assert counts(found["epoch_loop.val_loop.batch_progress"]) == validation
    assert found["epoch_loop.batch_progress"]["is_last_batch"] == is_last
    assert found["epoch_loop.automatic_optimization.optim_progress"] == {"kept": 1}
    assert "epoch_progress" not in SAVED


class Net(Small):
    def validation_step(self, batch, batch_idx):
        pass


class Places(pl.Callback):
    def __init__(self):
        self.steps, self.epochs = [], []

    def on_train_batch_end(self, trainer, *_):
        self.steps.append((ends_step(trainer), trainer.global_step))

    def on_validation_end(self, trainer, module):
        self.validated = True

    def on_train_epoch_end(self, trainer, module):
        self.epochs.append((is_validation_epoch(trainer), self.__dict__.pop("validated", False)))


@pytest.mark.filterwarnings("ignore")
def test_a_step_ends_where_lightning_counts_it_and_an_epoch_validates_where_it_did():
    places = Places()
    fit(Net(), places, batches=5, val_loader=DataLoader(torch.ones(1, 1)), max_epochs=4, num_sanity_val_steps=0,
        accumulate_grad_batches=2, check_val_every_n_epoch=2)  # fmt: skip
    steps = [0, *(step for _, step in places.steps)]
    assert [ends for ends, _ in places.steps] == [after > before for before, after in zip(steps, steps[1:])]
    assert [ends for ends, _ in places.steps[:5]] == [False, True, False, True, True]
    assert places.epochs == [(False, False), (True, True)] * 2
