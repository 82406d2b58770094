"""The direction of EarlyStopping, and what a run says that it ended."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.checkpoints.files import complete_checkpoints
from plain_task import Small, fit
from runs import succeed


class Rising(Small):
    def validation_step(self, batch, batch_idx):
        self.log("val/acc", float(self.current_epoch))
        self.log("val/energy", -float(self.current_epoch))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("monitor", "mode", "epochs"),
    [("val/acc", "auto", 4), ("val/acc", "min", 2), ("val/energy", "auto", 4)],
)
def test_the_direction_follows_the_metric(monitor, mode, epochs, tmp_path):
    stop = EarlyStopping(monitor, mode, patience=1)
    best = Checkpoints(tmp_path, monitor="val/energy", mode="min")
    loader = DataLoader(torch.ones(1, 2))
    trainer = fit(Rising(), stop, best, val_loader=loader, max_epochs=4, num_sanity_val_steps=0)
    assert trainer.current_epoch == epochs


class Worse(Small):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", float(self.current_epoch))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop_of", [EarlyStopping, pl.callbacks.EarlyStopping])
def test_a_resume_may_change_the_patience(stop_of, tmp_path):
    def epochs(patience, **options):
        stop = stop_of("val/loss", patience=patience)
        best = Checkpoints(tmp_path, monitor="val/loss", mode="min")
        loader = DataLoader(torch.ones(1, 2))
        return fit(Worse(), stop, best, val_loader=loader, num_sanity_val_steps=0, **options)

    epochs(patience=9, max_epochs=2)
    [(path, _)] = complete_checkpoints(tmp_path, "last")
    assert epochs(patience=3, max_epochs=9, ckpt_path=path).current_epoch == 4


def test_log_page_and_record_name_early_stopping(tmp_path):
    options = ["callbacks.early_stopping.monitor=val/acc", "callbacks.early_stopping.patience=1"]
    short = ["trainer.limit_train_batches=2", "optimizer.lr=0", "seed=1"]
    start = ["experiment=quickstart", "callbacks=early_stopping"]
    done = succeed("train", *start, *options, *short, logs=tmp_path)
    assert done.record["epochs"] == 2 and done.record["ended_by"] == "early_stopping"
    assert "val/acc did not improve" in done.output
    assert "ended by early stopping" in done.folder.page.read_text()
