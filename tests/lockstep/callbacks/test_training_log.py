"""Which steps become rows of metrics.csv, and that their seconds go on over the starts of a run."""

import csv
import time

import lightning.pytorch as pl
import pytest
import torch

from lockstep.callbacks.metrics_csv import MetricsCsv
from lockstep.callbacks.training_log import TrainingLog, last_time_s


class Net(pl.LightningModule):
    """Counts its own loss; asks for the end at a micro-batch, as a swarm that is done does."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.layer, self.stop_at, self.losses = torch.nn.Linear(2, 1), stop_at, []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.stop_at:
            self.trainer.should_stop = True
        self.losses.append(float(batch_idx))
        return self.layer(batch).square().sum()

    def take_loss_sum(self):
        total, number = sum(self.losses, 0.0), len(self.losses)
        self.losses = []
        return torch.tensor(total), number

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.25)


def fit(folder, module, *, resume_step=None, batches=40, log=None, more=(), **options):
    logger = MetricsCsv(folder / "metrics.csv", resume_step)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[log or TrainingLog(8), *more], log_every_n_steps=50, **options,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8 * batches, 2), batch_size=8))
    with logger.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_an_epoch_shorter_than_the_interval_has_the_row_of_its_last_step(tmp_path):
    (row,) = fit(tmp_path, Net(), batches=3)
    assert (row["step"], row["train/loss"], row["lr"]) == ("3", "1.0", "0.25")


def test_a_callback_has_the_loss_from_the_batchs_outputs(tmp_path):
    """As docs/howto.md says: divided by the accumulation steps, and not among the trainer's metrics."""
    seen = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append((float(outputs["loss"]), "train/loss" in trainer.callback_metrics))

    class Twelve(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 0 + 12.0

    fit(tmp_path, Twelve(), batches=8, more=[Reads()], accumulate_grad_batches=4)
    assert seen == [(3.0, False)] * 8


@pytest.mark.parametrize("stop_at, step", [(15, "4"), (17, "4")])
def test_a_training_that_stops_within_an_epoch_has_a_row(tmp_path, stop_at, step):
    """17: in the middle of an accumulation, as where other peers have filled the batch."""
    (row,) = fit(tmp_path, Net(stop_at), accumulate_grad_batches=4)
    assert (row["step"], row["lr"]) == (step, "0.25")
    assert float(row["train/loss"]) == sum(range(stop_at + 1)) / (stop_at + 1)


def test_a_training_that_ends_at_max_steps_has_a_row(tmp_path):
    (row,) = fit(tmp_path, Net(), max_steps=7)
    assert (row["step"], row["train/loss"]) == ("7", "3.0")


def test_the_seconds_of_a_resumed_run_go_on(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,epoch,time_s,train/loss\n2,0,40.5,1.0\n4,0,81.25,0.9\n9,0,200.0,0.8\n")
    started = time.monotonic()
    log = TrainingLog(8)
    kept = fit(tmp_path, Net(), resume_step=4, batches=3, log=log)
    assert [row["time_s"] for row in kept[:2]] == ["40.5", "81.25"]
    assert 81.25 < float(kept[2]["time_s"]) <= 81.25 + time.monotonic() - started + 0.01


def test_a_file_that_cannot_be_read_counts_from_zero(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,epoch,time_s\n1,0,soon\n")
    assert last_time_s(tmp_path / "metrics.csv") == last_time_s(tmp_path / "none.csv") == 0.0
