"""The direction of EarlyStopping, and what a run says that it ended."""

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.early_stopping import EarlyStopping
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.files import complete_checkpoints
from lockstep.loggers.metrics_csv import MetricsCsv
from lockstep.records.record import RunRecord
from lockstep.runs.resume import find_reached_limit
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


def epochs(folder, stop_of, patience, max_epochs=9, ckpt_path=None):
    """Train `Worse` and return the number of its epochs."""
    stop = stop_of("val/loss", patience=patience)
    best = Checkpoints(folder, monitor="val/loss", mode="min")
    loader = DataLoader(torch.ones(1, 2))
    options = {"num_sanity_val_steps": 0, "max_epochs": max_epochs, "ckpt_path": ckpt_path}
    return fit(Worse(), stop, best, val_loader=loader, **options).current_epoch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop_of", [EarlyStopping, pl.callbacks.EarlyStopping])
def test_a_resume_may_change_the_patience(stop_of, tmp_path):
    epochs(tmp_path, stop_of, patience=9, max_epochs=2)
    [(path, _)] = complete_checkpoints(tmp_path, "last")
    assert epochs(tmp_path, stop_of, patience=3, ckpt_path=path) == 4


def test_log_page_and_record_name_early_stopping(tmp_path):
    options = ["callbacks.early_stopping.monitor=val/acc", "callbacks.early_stopping.patience=1"]
    short = ["trainer.limit_train_batches=2", "optimizer.lr=0", "seed=1"]
    start = ["experiment=quickstart", "callbacks=early_stopping"]
    done = succeed("train", *start, *options, *short, logs=tmp_path)
    assert done.record["epochs"] == 2 and done.record["ended_by"] == "early_stopping"
    assert "val/acc did not improve" in done.output
    assert "ended by early stopping" in done.folder.page.read_text()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop_of", [EarlyStopping, pl.callbacks.EarlyStopping])
def test_more_patience_takes_up_a_training_that_had_ended(stop_of, tmp_path):
    assert epochs(tmp_path, stop_of, patience=2) == 3
    [(path, _)] = complete_checkpoints(tmp_path, "last")
    assert epochs(tmp_path, stop_of, patience=2, ckpt_path=path) == 3
    assert epochs(tmp_path, stop_of, patience=4, ckpt_path=path) == 5


def test_more_patience_leaves_a_finished_run_something_to_do():
    def config(patience):
        stop = {"monitor": "val/acc", "patience": patience}
        trainer = {"max_epochs": 9, "max_steps": -1, "max_time": None}
        return {"trainer": trainer, "callbacks": {"early_stopping": stop, "hardware": None}}

    record = RunRecord(status="finished", epochs=3, steps=30, ended_by="early_stopping")
    assert find_reached_limit(config(2), config(2), record) == "epochs"
    assert find_reached_limit(config(4), config(2), record) is None


@pytest.mark.filterwarnings("ignore")
def test_steps_before_min_epochs_are_no_last_ones(tmp_path):
    """EarlyStopping asks for the end in epoch 2 of 5, and Lightning goes on."""
    stop = EarlyStopping("val/loss", patience=1)
    log, table = TrainingLog(), MetricsCsv(tmp_path / "metrics.csv")
    options = {"val_loader": DataLoader(torch.ones(1, 2)), "num_sanity_val_steps": 0}
    options |= {"logger": table, "log_every_n_steps": 50}
    trainer = fit(Worse(), stop, log, batches=4, min_epochs=5, max_epochs=9, **options)
    assert trainer.current_epoch == 5 and trainer.should_stop
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["4", "8", "12", "16", "20"]
