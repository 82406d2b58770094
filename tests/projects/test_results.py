"""What a run of any module shows: its metrics, its hyperparameters and its best checkpoint."""

import json
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lockstep.checkpoints.files import complete_checkpoints
from lockstep.records import metric_names
from runs import succeed

SHORT = ("trainer=cpu", "trainer.num_threads=1", "trainer.max_epochs=1", "run_id=r")
VAE = ("task._target_=projects.vae.VAE", "data._target_=projects.vae.Images")

UNSYNCHRONISED = """
import lightning.pytorch as pl
import torch
from projects.autoencoder import Autoencoder, Images

class Model(Autoencoder):
    def validation_step(self, batch, batch_idx):
        # The mean over two ranks falls in the second epoch, and that of rank 0 rises.
        rank = self.global_rank
        first, second = [(1.0, 5.0), (2.0, 0.0)][self.current_epoch]
        self.log("val_loss", torch.tensor(second if rank else first))
"""


def make_importable(*folders):
    warnings.filterwarnings("ignore", ".*sync_dist=True.*")
    sys.path[:0] = map(str, folders)


TESTS = Path(__file__).parents[1]
PROJECTS = partial(make_importable, TESTS)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("val/loss", ("val", "loss")),
        ("valid_loss", ("val", "loss")),
        ("validation_accuracy", ("val", "accuracy")),
        ("test_loss", ("test", "loss")),
        ("training/loss", ("train", "loss")),
        ("value", ("", "value")),
        ("valued_loss", ("", "valued_loss")),
    ],
)
def test_names_of_one_metric_have_one_stem(name, split):
    assert metric_names.split_stage(name) == split


def test_the_tested_metric_is_of_the_monitored_stem():
    assert metric_names.metric_of_test("valid_loss", ["test_acc", "test/loss"]) == "test/loss"
    assert metric_names.metric_of_test("validation_accuracy") == "test_accuracy"
    assert metric_names.metric_of_test("val/mae") == "test/mae"


def test_a_page_pairs_validated_and_tested_metrics(tmp_path):
    overrides = ("task._target_=projects.segmentation.SegModel", "task.monitor=valid_loss")
    done = succeed("train", *overrides, "task.mode=min", *SHORT, logs=tmp_path, before=PROJECTS)
    metrics = done.record["metrics"]
    page = done.folder.page.read_text()
    row = f"{metrics['valid_loss_best']:.4g} | {metrics['test_loss']:.4g} |"
    assert any(line.startswith("| **loss**") and line.endswith(row) for line in page.splitlines())
    last_line = done.output.strip().splitlines()[-1]
    assert f"test_loss {metrics['test_loss']:.4g}" in last_line


def test_without_validation_the_training_metrics_are_the_results(tmp_path):
    overrides = ("task._target_=projects.gan.GAN", "data._target_=projects.gan.Images")
    done = succeed("train", *overrides, *SHORT, logs=tmp_path, before=PROJECTS)
    page = done.folder.page.read_text().partition("## How it was started")[0]
    assert "The run has no results" not in page
    for name in ("g_loss", "d_loss"):
        assert f"| {name} | {done.record['metrics'][name]:.4g} |" in page
    assert "logger.csv has no add_images" in done.output


def hparams_of(folder):
    """Return the hyperparameters in TensorBoard's event files, and the scalars' names."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    contents = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    info = HParamsPluginData.FromString(contents).session_start_info
    values = {name: value.number_value for name, value in info.hparams.items()}
    return values, events


def test_hyperparameters_reach_tensorboard_with_the_monitored_metric(tmp_path):
    overrides = (*VAE, "task.monitor=val_loss", "task.mode=min", "+task.kl_coeff=0.25")
    done = succeed("train", *overrides, *SHORT, logs=tmp_path, before=PROJECTS)
    values, events = hparams_of(done.folder.path)
    assert values["kl_coeff"] == 0.25
    best = events.Scalars("val_loss_best")[-1].value
    assert best == pytest.approx(done.record["metrics"]["val_loss_best"])


def test_ranks_with_values_of_their_own_choose_by_the_mean(tmp_path):
    (tmp_path / "theirs.py").write_text(UNSYNCHRONISED)
    overrides = (
        "task._target_=theirs.Model",
        "data._target_=theirs.Images",
        "task.monitor=val_loss",
    )
    more = ("task.mode=min", "trainer=ddp_sim", "trainer.max_epochs=2", "run_id=r")
    before = partial(make_importable, tmp_path, TESTS)
    done = succeed("train", *overrides, *more, logs=tmp_path, before=before)
    assert done.output.count("val_loss was logged without sync_dist=True") == 1
    ((_, sidecar),) = complete_checkpoints(done.folder.checkpoints, "best")
    assert (sidecar.epoch, sidecar.metric["val_loss"]) == (1, 1.0)
    record = json.loads(done.folder.record_path.read_text())
    assert record["metrics"]["val_loss_best"] == 1.0
