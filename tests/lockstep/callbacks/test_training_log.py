"""What a run writes down of its training: its record of speed and losses, metrics.csv."""

import csv
import time
from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lockstep.callbacks.training_log import TrainingLog, evaluation_metrics, refuse_small_eps
from lockstep.callbacks.unused_parameters import UnusedParameters
from lockstep.loggers.metrics_csv import MetricsCsv
from lockstep.process.errors import Diverged, UserError
from lockstep.training.task import Task
from plain_task import Small, TwoOptimizers, fit


class Net(Small):
    """Its loss is the number of the batch.

    Asks for the end at a micro-batch, as a swarm that is done does.
    """

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.stop_at:
            self.trainer.should_stop = True
        return 0 * self.layer(batch).sum() + batch_idx


def logged(folder, module, *, batches=40, log=None, more=(), **options):
    """Return the rows of metrics.csv."""
    logger = MetricsCsv(folder / "metrics.csv")
    fit(module, log or TrainingLog(8), *more, batches=batches, batch_size=8, logger=logger,
        **{"log_every_n_steps": 50, **options})  # fmt: skip
    with logger.path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "batches, stop_at, accumulate, step", [(3, None, 1, "3"), (40, 15, 4, "4"), (40, 17, 4, "4")]
)
def test_short_epochs_and_stops_within_an_interval_have_rows(
    tmp_path, batches, stop_at, accumulate, step
):
    """17: in the middle of an accumulation, as where other peers have filled the batch."""
    (row,) = logged(tmp_path, Net(stop_at), batches=batches, accumulate_grad_batches=accumulate)
    assert (row["step"], row["lr"]) == (step, "0.25")
    assert float(row["train/loss"]) == (stop_at or 2) / 2


def test_steps_count_batches_also_under_several_optimizers(tmp_path):
    found = logged(tmp_path, TwoOptimizers(), batches=6, log_every_n_steps=2)
    assert [row["step"] for row in found] == ["2", "4", "6"]
    assert [float(row["train/loss"]) for row in found] == [0.5, 2.5, 4.5]
    assert [float(row["own"]) for row in found] == [1, 3, 5]
    log = TrainingLog(8)
    log.load_state_dict({"step": 2})
    found = logged(tmp_path, TwoOptimizers(), batches=1, log=log)
    assert [row["step"] for row in found] == ["2", "3"], "rows of steps that were lost are removed"
    assert [row["step"] for row in logged(tmp_path, Net(), batches=1)] == ["1"], (
        "another training is another table"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_epochs": 2, "max_steps": 100}, "after 80 of trainer.max_steps=100 steps: give"),
        ({"max_epochs": 2, "max_steps": 7, "accumulate_grad_batches": 8}, None),
        ({"max_epochs": 1, "max_steps": 7, "accumulate_grad_batches": 8}, "after 5 of"),
        ({"max_epochs": 2, "max_steps": -1}, None),
        ({"max_epochs": -1, "max_steps": 50}, None),
    ],
)
def test_epochs_that_end_before_the_steps_are_named(options, said, tmp_path, caplog):
    logged(tmp_path, Small(), **options)
    assert (said in caplog.text) if said else ("ends the training" not in caplog.text)


def test_a_rate_may_be_missing(tmp_path):
    class Plain(TwoOptimizers):
        def training_step(self, batch, batch_idx):
            return {"loss": torch.tensor(0.5)}

        def configure_optimizers(self):
            optimizers = super().configure_optimizers()
            optimizers[0].param_groups[0]["lr"] = None
            return optimizers

    (row,) = logged(tmp_path, Plain(), batches=1)
    assert float(row["train/loss"]) == 0.5 and not row.get("lr")


def test_a_value_loss_is_no_metric_of_the_validation():
    metrics = {"value_loss": 1, "val_loss": 2, "valid/acc": 3, "validation_f1": 4, "test_acc": 5}
    trainer = SimpleNamespace(callback_metrics=metrics)
    assert evaluation_metrics(trainer, "val") == {"val_loss": 2, "valid/acc": 3, "validation_f1": 4}


def test_a_logged_value_named_step_moves_no_row(tmp_path):
    class Named(Net):
        def on_train_epoch_end(self):
            self.log("step", float(self.current_epoch))
            self.log("own", 7.0)

    assert [(row["step"], row["own"]) for row in logged(tmp_path, Named(), batches=3, max_epochs=2)] == [
        ("3", "7.0"), ("6", "7.0")
    ]  # fmt: skip


def test_a_missing_loss_is_allowed_and_nan_ends_training(
    tmp_path,
):
    class NoLoss(TwoOptimizers):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)

    class Nan(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("nan")

    (row,) = logged(tmp_path, NoLoss(), batches=3)
    assert row["step"] == "3" and "train/loss" not in row and row["lr"] == "0.1"
    with pytest.raises(Diverged, match="train/loss became nan by step 3"):
        logged(tmp_path, Nan(), batches=3)
    # A dry run on simulated GPUs computes nothing, and goes on to its validation.
    dry_run = UnusedParameters(str(tmp_path / "unused.json"), checks_loss=False)
    (row,) = logged(tmp_path, Nan(), batches=3, more=[dry_run])
    assert row["train/loss"] == "nan"


def test_losses_before_a_checkpoint_in_mid_epoch_count_after_it(tmp_path):
    class Saves(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")

    (whole,) = logged(tmp_path, Net(), batches=6, more=[Saves()])
    state = torch.load(tmp_path / "mid.ckpt", weights_only=True)
    held = state["callbacks"]["TrainingLog"]
    assert held["step"] == 3 and held["losses"] == [3.0, 3] and held["seconds"] > 0
    log = TrainingLog(8)
    log.load_state_dict({**held, "step": 0, "seconds": 80.0})
    (resumed,) = logged(tmp_path, Net(), batches=3, log=log)
    assert float(whole["train/loss"]) == 2.5 and float(resumed["train/loss"]) == 1.0  # (3 + 3) / 6
    assert 80 < float(resumed["time_s"]) < 100, "the seconds of all starts"


def test_an_eps_that_is_zero_in_float16_is_refused(tmp_path):
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 1).parameters())
    trainer = SimpleNamespace(optimizers=[optimizer], precision="16-true")
    with pytest.raises(
        UserError, match=r"optimizer.eps=1e-08 is 0 .*optimizer.eps=1e-4, .*bf16-mixed"
    ):
        refuse_small_eps(trainer)
    for precision, eps in (("16-mixed", 1e-8), ("bf16-true", 1e-8), ("16-true", 1e-4)):
        optimizer.param_groups[0]["eps"], trainer.precision = eps, precision
        refuse_small_eps(trainer)


class Slow(Small):
    def training_step(self, batch, batch_idx):
        time.sleep(0.3 if batch_idx == 0 else 0.006)
        return super().training_step(batch, batch_idx)


class SlowRows(torch.utils.data.Dataset):
    def __len__(self):
        return 250

    def __getitem__(self, index):
        time.sleep(0.0008)
        return torch.ones(2)


def test_images_per_second_step_times_and_data_wait():
    log = TrainingLog()
    assert log.record_fields() == {}
    fit(Slow(), log, data=SlowRows(), batch_size=5, accumulate_grad_batches=2, log_every_n_steps=5)
    fields = log.record_fields()
    throughput = fields["throughput"]
    # Two micro-batches of 6 ms compute and 4 ms data make a step of a little over 20 ms; the first
    # step does not count.
    assert 0.020 < throughput["step_seconds"]["p50"] <= throughput["step_seconds"]["p95"] < 0.100
    assert throughput["images_per_s"] == pytest.approx(
        10 / throughput["step_seconds"]["mean"], rel=1e-3
    )
    assert (
        fields["images_per_s"]
        == throughput["images_per_s"]
        == throughput["images_per_s_per_device"]
    )
    assert 0.15 < throughput["data_wait_share"] < 0.65


class Counted(Task):
    """Half of the images of batch 0 are right, all of the others."""

    def training_step(self, batch, batch_idx):
        self.count(acc=torch.arange(len(batch)) >= (len(batch) // 2 if batch_idx == 0 else 0))
        return self.net(batch).sum()


def test_an_epochs_last_row_has_the_tasks_training_counts(tmp_path):
    module = Counted(nn.Linear(2, 1), partial(torch.optim.SGD, lr=0.01))
    first, last = logged(tmp_path, module, batches=4, log_every_n_steps=2)
    assert first["train/acc"] == "" and float(last["train/acc"]) == 28 / 32


class OwnBatch:
    def __init__(self, items):
        self.images = torch.stack(items)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_of_the_users_own_class_has_no_speed(tmp_path):
    class OfOwn(Small):
        def training_step(self, batch, batch_idx):
            return self.layer(batch.images).sum()

    logger = MetricsCsv(tmp_path / "metrics.csv")
    loader = torch.utils.data.DataLoader(torch.ones(8, 2), 2, collate_fn=OwnBatch)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, callbacks=[TrainingLog()], logger=logger,
                         log_every_n_steps=1, enable_progress_bar=False,
                         enable_checkpointing=False)  # fmt: skip
    trainer.fit(OfOwn(), loader)
    assert trainer.global_step == 8
    assert "images_per_s" not in logger.path.read_text().splitlines()[0]
