"""metrics.csv over the starts of a run, whenever one was killed, and what each column means."""

import csv
import os
import signal
import time
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from faults import signal_at_step
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.files import newest_whole, read_sidecar
from lockstep.loggers.metrics_csv import MetricsCsv, read_rows
from plain_task import Numbers, Regression, Small, fit
from runs import run_script


def rows(path):
    """Return the rows of a CSV file without its empty cells."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: value for name, value in row.items() if value} for row in csv.DictReader(file)
        ]


def steps(path):
    return [int(row["step"]) for row in rows(path)]


def written(path):
    """Write the rows of steps 4 and 8."""
    logger = MetricsCsv(path)
    for step in (4, 8):
        logger.write_row({"epoch": 0, "train/loss": step}, step)
        logger.write_row({"val/acc": step / 10}, step)
    logger.finalize("")
    return rows(path)


# What a kill leaves.

LONG = ["trainer.max_epochs=1", "data.global_batch_size=16", "trainer.log_every_n_steps=4"]
OFTEN = ["callbacks.checkpoints.every_minutes=0", "~callbacks.hardware", "run_id=r", "test=false"]


@pytest.mark.slow
def test_a_kill_leaves_the_rows_of_the_checkpoint(tmp_path):
    command = ["train", *LONG, *OFTEN, "trainer.num_threads=1"]
    killed = run_script(*command, logs=tmp_path, before=partial(signal_at_step, 30, signal.SIGKILL))
    folder = tmp_path / "train/runs/r"
    checkpoint = newest_whole(folder / "checkpoints")
    assert killed.code != 0 and read_sidecar(checkpoint).step == 28, killed.output
    assert steps(folder / "metrics.csv") == list(range(4, 29, 4))
    done = run_script(*command, "resume=r", logs=tmp_path)
    assert done.code == 0, done.output
    end = done.record["steps"]
    assert steps(folder / "metrics.csv") == sorted({*range(4, end + 1, 4), end})


def test_rows_are_synced_before_the_checkpoint_is_visible(tmp_path, monkeypatch):
    held, path = {}, tmp_path / "metrics.csv"
    sync = MetricsCsv.sync

    def look(self):
        sync(self)
        held[self.table.last_row["step"]] = len(list(tmp_path.glob("*.ckpt.json")))

    monkeypatch.setattr(MetricsCsv, "sync", look)
    log, often = TrainingLog(1), Checkpoints(tmp_path, "val/x", every_minutes=0.0)
    options = {"logger": MetricsCsv(path), "log_every_n_steps": 2}
    fit(Small(), log, often, batches=5, **options)
    assert held[2] == 0 and held[4] == 1, "the row of a step is there before its checkpoint"


def test_a_log_point_does_not_rewrite_the_file(tmp_path):
    logger = MetricsCsv(tmp_path / "m.csv")
    logger.write_row({"train/loss": 1.0}, 1)
    inode = os.stat(logger.path).st_ino
    for step in range(2, 50):
        logger.write_row({"train/loss": 1.0}, step)
        logger.log_metrics({"epoch": 0}, step - 1)
        logger.sync()
    assert os.stat(logger.path).st_ino == inode and steps(logger.path) == list(range(1, 50))
    logger.write_row({"val/acc": 0.5}, 49)
    assert os.stat(logger.path).st_ino != inode, "a new column rewrites it once"


@pytest.mark.slow
def test_a_row_costs_the_same_after_100_000_rows(tmp_path):
    logger = MetricsCsv(tmp_path / "m.csv")
    seconds = []
    for step in range(1, 100_001):
        began_at = time.perf_counter()
        logger.write_row({"train/loss": step / 7, "lr": 0.1}, step)
        logger.log_metrics({"own": step}, step - 1)
        logger.save()
        seconds.append(time.perf_counter() - began_at)
    first, last = (sorted(part)[500] for part in (seconds[1:1001], seconds[-1000:]))
    assert last < 3 * first
    assert steps(logger.path) == list(range(1, 100_001))


# Restarts.


def test_a_start_that_is_killed_at_once_loses_no_row(tmp_path):
    before = written(tmp_path / "m.csv")
    assert [row["step"] for row in before] == ["4", "8"]
    MetricsCsv(tmp_path / "m.csv").log_metrics({"val/loss": 1}, 8)
    assert rows(tmp_path / "m.csv") == before


@pytest.mark.parametrize(
    ("resume_step", "values", "after"),
    [
        (8, {8: {"val/acc": 0.9}, 12: {"train/loss": 3}}, ["4", "8", "12"]),
        (6, {7: {"new": 1}, 8: {"val/acc": 0.9}}, ["4", "7", "8"]),
    ],
    ids=["its row is completed once", "rows after it are removed"],
)
def test_a_resumed_run_goes_on_from_its_step(tmp_path, resume_step, values, after):
    first, last = written(tmp_path / "m.csv")
    logger = MetricsCsv(tmp_path / "m.csv")
    logger.begin_at(resume_step)
    for step, row in values.items():
        logger.write_row(row, step)
    logger.finalize("")
    table = {row["step"]: row for row in rows(logger.path)}
    assert list(table) == after and table["4"] == first
    assert table["8"]["val/acc"] == "0.9"
    assert ("train/loss" in table["8"]) == (resume_step == 8)


def test_a_module_alone_goes_on_with_its_file(tmp_path):
    """Without TrainingLog the first value of a start tells where it begins."""
    for start in (0, 2):
        logger = MetricsCsv(tmp_path / "m.csv")
        for step in range(start, 4):
            logger.log_metrics({"epoch": 0, "train/loss": step + 10 * start}, step)
        logger.finalize("")
    losses = [(row["step"], row["train/loss"]) for row in rows(logger.path)]
    assert losses == [("0", "0"), ("1", "1"), ("2", "22"), ("3", "23")]


@pytest.mark.parametrize("damage", [b"5,0,1.0,7,8,9,10", b"5,\xff", b"\0\0,1"])
def test_a_damaged_line_is_removed(damage, tmp_path):
    path = tmp_path / "m.csv"
    before = written(path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\r\n".join([*lines[:2], damage, *lines[2:]]) + b"\r\n")
    MetricsCsv(path).begin_at(8)
    assert rows(path) == before


@pytest.mark.parametrize("cells", [1, 2, 3, 4])
def test_a_row_that_was_cut_short_is_replaced(cells, tmp_path):
    path = tmp_path / "m.csv"
    first, _ = written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + b",".join(lines[2].split(b",")[:cells]))
    logger = MetricsCsv(path)
    logger.begin_at(8)
    logger.write_row({"train/loss": 9}, 8)
    assert rows(path) == [first, {"step": "8", "train/loss": "9"}]


# One meaning for each column.


def test_a_modules_values_share_the_row_of_their_step(tmp_path):
    """Lightning counts from 0, and logs after TrainingLog; an epoch's value when a row is saved."""
    logger = MetricsCsv(tmp_path / "m.csv")
    logger.begin_at(0)
    for step in (1, 2):
        logger.write_row({"epoch": 0, "train/loss": step}, step)
        logger.log_metrics({"epoch": 0, "own": 10 * step}, step - 1)
        logger.save()
        logger.log_metrics({"epoch": 0, "of_epoch": 100 * step}, step - 1)
    logger.finalize("")
    assert [list(row.values()) for row in rows(logger.path)] == [
        ["1", "0", "1", "10", "100"],
        ["2", "0", "2", "20", "200"],
    ]


class Logs(Small):
    """Its loss is the number of the batch; it logs a loss of its own, and its rate halves."""

    def training_step(self, batch, batch_idx):
        self.log("train/loss", 100.0 + batch_idx)
        return 0 * self.layer(batch).sum() + batch_idx

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def logged(folder, *callbacks, **options):
    logger = MetricsCsv(folder / "metrics.csv")
    fit(Logs(), *callbacks, logger=logger, **options)
    return rows(logger.path)


def test_a_loss_of_the_module_has_its_own_column(tmp_path):
    table = logged(tmp_path, TrainingLog(1), batches=4, log_every_n_steps=2)
    assert [row["train/loss"] for row in table] == ["0.5", "2.5"]
    assert [row["module/train/loss"] for row in table] == ["101.0", "103.0"]


def test_without_training_log_the_modules_loss_keeps_its_name(tmp_path):
    table = logged(tmp_path, batches=4, log_every_n_steps=2)
    assert [row["train/loss"] for row in table] == ["101.0", "103.0"]


def test_the_learning_rate_is_that_of_the_step(tmp_path):
    table = logged(tmp_path, TrainingLog(1), batches=3, log_every_n_steps=1)
    assert [float(row["lr"]) for row in table] == [1.0, 0.5, 0.25]


def test_the_first_step_of_a_start_has_no_speed(tmp_path):
    table = logged(tmp_path, TrainingLog(1), batches=3, log_every_n_steps=1)
    assert ["images_per_s" in row for row in table] == [False, True, True]


class StopsAt(pl.Callback):
    """Ask for the end within an epoch, as trainer.max_time does."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.should_stop = True


def losses_of(folder, stop_at=None, **options):
    """Train on from the newest checkpoint; return the mean loss of each row that has one."""
    table = logged(
        folder,
        StopsAt(stop_at),
        TrainingLog(1),
        Checkpoints(folder, "val/x", every_minutes=None),
        batches=12,
        log_every_n_steps=4,
        ckpt_path=newest_whole(folder),
        **options,
    )
    return {row["step"]: row["train/loss"] for row in table if "train/loss" in row}


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
def test_a_stop_within_an_epoch_leaves_no_kink(tmp_path):
    whole = losses_of(tmp_path / "whole")
    assert whole == {"4": "1.5", "8": "5.5", "12": "9.5"}
    # With the limits of its end a resume would train nothing more.
    stopped = losses_of(tmp_path / "stopped", stop_at=6, max_epochs=2)
    assert stopped == {"4": "1.5", "6": "4.5"}
    assert losses_of(tmp_path / "stopped") == whole


# Tests.


def run_with_test(folder, max_epochs=1):
    loggers = [
        MetricsCsv(folder / "metrics.csv"),
        TensorBoardLogger(folder, name="tb", version=""),
    ]
    checkpoints = Checkpoints(folder / "checkpoints", "val_loss", "min")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        logger=loggers,
        callbacks=[TrainingLog(), checkpoints],
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    module = Regression()
    resume = newest_whole(folder / "checkpoints")
    trainer.fit(module, datamodule=Numbers(), ckpt_path=resume, weights_only=True)
    return trainer.test(module, datamodule=Numbers(), verbose=False)[0]["test_loss"]


def test_a_test_is_in_the_last_row_and_in_tensorboard(tmp_path):
    value = run_with_test(tmp_path)
    table = rows(tmp_path / "metrics.csv")
    assert [row.get("test_loss") for row in table] == [None, str(value)]
    assert table[-1]["step"] == "10" and float(table[-1]["val_loss"]) > 0
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.value for event in events.Scalars("test_loss")] == [pytest.approx(value)]


def test_a_run_that_goes_on_keeps_only_its_last_test(tmp_path):
    run_with_test(tmp_path)
    value = run_with_test(tmp_path, max_epochs=2)
    table = rows(tmp_path / "metrics.csv")
    assert {row["step"]: row["test_loss"] for row in table if "test_loss" in row} == {
        "20": str(value)
    }


def test_a_test_without_training_removes_no_row(tmp_path):
    before = written(tmp_path / "m.csv")
    trainer = pl.Trainer(
        accelerator="cpu", logger=MetricsCsv(tmp_path / "m.csv"), enable_progress_bar=False
    )
    data = Numbers()
    data.setup("test")
    trainer.test(Regression(), DataLoader(data.parts[1], 16), verbose=False)
    first, last = rows(tmp_path / "m.csv")
    assert first == before[0] and last.items() > before[1].items() and "test_loss" in last


def test_a_name_of_a_test_may_be_logged_in_training(tmp_path):
    logger = MetricsCsv(tmp_path / "m.csv")
    logger.begin_at(0)
    for step in (5, 10):
        logger.write_row({"epoch": step // 5}, step)
        logger.log_metrics({"test_acc": step / 10}, step)
    logger.add_to_last_row({"test/loss": 0.5})
    logger.save()
    MetricsCsv(tmp_path / "m.csv").begin_at(10)
    rows = list(read_rows(tmp_path / "m.csv"))
    assert [row.get("test_acc") for row in rows] == ["0.5", "1.0"]
    assert [row.get("test/loss") for row in rows] == [None, None]
