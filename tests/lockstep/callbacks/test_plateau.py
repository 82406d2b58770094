"""The metric that ReduceLROnPlateau goes by: of the training, over a resume, and wrong ones."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.files import complete_checkpoints
from lockstep.process.errors import Interrupted, UserError
from lockstep.training.task import Task
from plain_task import fit

# The mean loss of each epoch. Its last batches alone would improve in every epoch.
LOSSES = [4.0, 2.0, 2.0, 3.0, 2.0, 1.0, 1.0, 1.0]
SCHEDULE = partial(ReduceLROnPlateau, patience=0, factor=0.5)


class Losses(Task):
    """Its loss is the mean of the epoch, up to a part that cancels within the epoch."""

    def __init__(self, monitor="train/loss", schedule=SCHEDULE):
        super().__init__(nn.Linear(2, 1), partial(torch.optim.SGD, lr=1.0), schedule)
        self.monitor = monitor
        self.rates = []

    def on_train_epoch_start(self):
        self.rates.append(self.optimizers().param_groups[0]["lr"])

    def training_step(self, batch, batch_idx):
        part = 10.0 * self.current_epoch * (1 if batch_idx < 2 else -1)
        losses = 0 * self.net(batch).squeeze(1) + LOSSES[self.current_epoch] + part
        self.count(energy=-losses.detach() if batch_idx == 3 else losses.detach() * 0)
        return losses.mean()

    def validation_step(self, batch, batch_idx):
        self.count(loss=self.net(batch).squeeze(1))


def rates(folder, module=None, **options):
    module = module or Losses()
    log = TrainingLog(1)
    checkpoints = Checkpoints(folder, "val/loss", "min")
    fit(module, log, checkpoints, log_every_n_steps=3, **options)
    return module.rates


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "stop",
    [{"max_epochs": 3}, {"max_epochs": 8, "max_steps": 14}, {"max_epochs": 8, "max_steps": 15}],
    ids=["epoch", "mid-epoch", "log point"],
)
def test_the_training_loss_of_epochs_counts_over_a_resume(stop, tmp_path):
    before = rates(tmp_path, **stop)
    [(path, _)] = complete_checkpoints(tmp_path, "last")
    after = rates(tmp_path, max_epochs=8, ckpt_path=path)
    assert before + after == [1.0, 1.0, 1.0, 0.5, 0.25, 0.125, 0.125, 0.0625]


@pytest.mark.filterwarnings("ignore")
def test_a_stop_in_a_validation_keeps_the_mean(tmp_path):
    interruption = Interruption()

    class Stopped(Losses):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if self.current_epoch == 3:
                interruption.request_stop("SIGTERM")

    loader = DataLoader(torch.ones(2, 2))
    module = Stopped()
    callbacks = (TrainingLog(1), Checkpoints(tmp_path, "val/loss", "min"), interruption)
    with pytest.raises(Interrupted):
        fit(module, *callbacks, max_epochs=8, val_loader=loader)
    [(path, _)] = complete_checkpoints(tmp_path, "last")
    after = rates(tmp_path, max_epochs=8, ckpt_path=path, val_loader=loader)
    assert module.rates + after == [1.0, 1.0, 1.0, 0.5, 0.25, 0.125, 0.125, 0.0625]


@pytest.mark.filterwarnings("ignore")
def test_a_schedule_goes_by_a_counted_metric_of_training(tmp_path):
    falling = partial(ReduceLROnPlateau, patience=0, factor=0.5, mode="max")
    module = Losses("train/energy", falling)
    assert rates(tmp_path, module, max_epochs=4) == [1.0, 1.0, 1.0, 1.0]
    module = Losses("train/energy", SCHEDULE)
    assert rates(tmp_path, module, max_epochs=4) == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("monitor", "has_validation", "sentence"),
    [
        ("val/los", True, "val/los is not logged. Pass one of train/loss, val/loss"),
        ("train/los", False, "train/los is not logged. Pass one of train/energy, train/loss"),
        ("loss", False, "loss is not logged. Pass one of train/energy, train/loss"),
        ("val/loss", False, "this training has none. Pass scheduler.monitor=train/loss"),
    ],
)
def test_a_metric_that_is_not_logged_is_refused(monitor, has_validation, sentence, tmp_path):
    loader = DataLoader(torch.ones(1, 2)) if has_validation else None
    with pytest.raises(UserError, match=sentence):
        rates(tmp_path, Losses(monitor), val_loader=loader)
