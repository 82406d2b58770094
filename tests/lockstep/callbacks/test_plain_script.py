"""Lockstep's callbacks in a plain script with pl.Trainer."""

import csv
import warnings

import lightning.pytorch as pl
import pytest

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.hang_dump import HangDump
from lockstep.callbacks.hardware_stats import HardwareStats
from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.metrics_csv import MetricsCsv
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.training_log import TrainingLog
from lockstep.callbacks.weight_average import WeightAverage
from lockstep.storage.checkpoint_files import complete
from plain_task import Numbers, Regression


def fit(folder, resume=None, epochs=2):
    log, hardware = TrainingLog(), HardwareStats(interval_s=0.05)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=epochs, default_root_dir=folder, log_every_n_steps=5, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False,
        logger=MetricsCsv(folder / "metrics.csv", 20 if resume else None),
        callbacks=[WeightAverage(0.9), HangDump(), log, Progress(), hardware,
                   Checkpoints(folder / "checkpoints", monitor="val_loss", mode="min"), Interruption()],
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Regression(), datamodule=Numbers(), ckpt_path=resume, weights_only=True)
    return trainer, log, hardware


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def test_they_log_measure_save_and_resume(folder, capsys):
    folder.mkdir()
    _, log, hardware = fit(folder)
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["5", "10", "15", "20"] and rows[-1]["val_loss"] and rows[0]["train/loss"]
    assert log.record_fields()["images_per_s"] > 0
    assert hardware.record_fields()["hardware"]["nodes"][0]["stats"]["rank0/memory_gib"]["max"] > 0.05
    assert (folder / "hardware-node0.csv").exists() and not list(folder.glob("stack-*"))
    assert "epoch 2/2 · done" in capsys.readouterr().out
    [(last, sidecar)] = complete(folder / "checkpoints", "last")
    assert sidecar.step == 20
    trainer, *_ = fit(folder, str(last), epochs=3)
    assert trainer.global_step == 30
    with (folder / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["5", "10", "15", "20", "25", "30"]
