"""A module's own schedule in a resume of another length."""

import pytest
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.checkpoints.files import newest_whole
from lockstep.process.errors import UserError
from plain_task import Small, fit

pytestmark = pytest.mark.filterwarnings("ignore")


def cosine(optimizer, trainer):
    return CosineAnnealingLR(optimizer, trainer.max_epochs)


def one_cycle(optimizer, trainer):
    return OneCycleLR(optimizer, 1.0, trainer.estimated_stepping_batches)


def sequence(optimizer, trainer):
    parts = [LinearLR(optimizer, total_iters=1), CosineAnnealingLR(optimizer, trainer.max_epochs)]
    return SequentialLR(optimizer, parts, milestones=[1])


def repeats_first_epoch(optimizer, trainer):
    return MultiStepLR(optimizer, [1, 4])


def computed(optimizer, trainer):
    return LambdaLR(optimizer, lambda epoch: 1 - epoch / trainer.max_epochs)


class Killed(Exception):
    pass


class Scheduled(Small):
    def __init__(self, make, killed_in=None):
        super().__init__()
        self.make = make
        self.killed_in = killed_in

    def on_train_epoch_start(self):
        if self.current_epoch == self.killed_in:
            raise Killed

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = self.make(optimizer, self.trainer)
        interval = "step" if self.make is one_cycle else "epoch"
        return [optimizer], [{"scheduler": schedule, "interval": interval}]


def resume(make, folder, epochs):
    """Resume a run of three epochs that was killed in the second; return its steps."""
    with pytest.raises(Killed):
        fit(Scheduled(make, killed_in=1), Checkpoints(folder), max_epochs=3)
    path = newest_whole(folder)
    return fit(Scheduled(make), Checkpoints(folder), max_epochs=epochs, ckpt_path=path).global_step


@pytest.mark.parametrize("make", [cosine, one_cycle, sequence])
def test_another_length_of_a_modules_schedule_is_refused(make, tmp_path):
    with pytest.raises(UserError, match="keeps the length .* resume it with .* ckpt_path="):
        resume(make, tmp_path, 5)


@pytest.mark.parametrize("make", [cosine, one_cycle, sequence, repeats_first_epoch])
def test_the_same_length_of_a_modules_schedule_resumes(make, tmp_path):
    assert resume(make, tmp_path, 3) == 12


@pytest.mark.parametrize("make", [repeats_first_epoch, computed])
def test_a_schedule_without_an_old_length_takes_more_epochs(make, tmp_path):
    assert resume(make, tmp_path, 5) == 20
