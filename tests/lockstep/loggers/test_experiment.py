"""A module writes into the experiment of each logger."""

import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

from lockstep.loggers.experiment import SkippingLogger, skip_other_methods
from lockstep.loggers.metrics_csv import MetricsCsv, read_rows
from plain_task import Small


class Plain(Logger):
    """A logger of the user's that has no experiment."""

    name = "plain"
    version = ""

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, *args, **kwargs):
        pass


def loggers_of(folder):
    csv = MetricsCsv(folder / "metrics.csv")
    csv.begin_at(0)
    csv.write_row({"epoch": 0}, 5)
    loggers = {"csv": csv, "tensorboard": TensorBoardLogger(folder), "plain": Plain()}
    for name, logger in loggers.items():
        skip_other_methods(logger, name)
    return loggers


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_method_that_a_logger_lacks_is_skipped(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    loggers = loggers_of(tmp_path)
    for _ in range(2):
        for logger in loggers.values():
            logger.experiment.add_image("image", torch.zeros(3, 2, 2), 0)
            logger.experiment.add_scalar("brightness", torch.tensor(0.5), 0)
            logger.experiment.log_image(key="image", images=[])
        loggers["csv"].experiment.add_figure("figure", None)
    lines = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert sorted(lines) == [
        "logger.csv has no add_figure",
        "logger.csv has no add_image",
        "logger.csv has no log_image",
        "logger.plain has no add_image",
        "logger.plain has no add_scalar",
        "logger.plain has no log_image",
        "logger.tensorboard has no log_image",
    ]
    loggers["csv"].save()
    assert next(read_rows(tmp_path / "metrics.csv"))["brightness"] == "0.5"


def test_loggers_and_experiments_stay_of_their_classes(tmp_path):
    loggers = loggers_of(tmp_path)
    assert isinstance(loggers["csv"], MetricsCsv)
    assert isinstance(loggers["tensorboard"], TensorBoardLogger)
    experiment = loggers["tensorboard"].experiment
    assert isinstance(experiment, SummaryWriter)
    assert experiment is loggers["tensorboard"].experiment
    for name in ("summary", "append"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'"):
            getattr(experiment, name)


def test_an_evaluation_skips_what_a_module_draws(tmp_path):
    logged = []

    class Drawing(Small):
        def test_step(self, batch, batch_idx):
            self.logger.experiment.add_figure("confusion", None)
            self.logger.log_image("images", [])
            logged.append(self.logger.save_dir)

    off = dict.fromkeys(("enable_checkpointing", "enable_progress_bar"), False)
    trainer = pl.Trainer(accelerator="cpu", logger=SkippingLogger(str(tmp_path)), **off)
    trainer.test(Drawing(), DataLoader(torch.ones(1, 2)), verbose=False)
    assert logged == [str(tmp_path)]
