"""Projects of well-known shapes run unchanged, and give what a plain Trainer gives."""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from hydra.utils import instantiate
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.checkpoints.load import read_checkpoint
from lockstep.config.locate import locate
from runs import start_script, succeed

FOLDER = Path(__file__).parent
SEED = 42
SHORT = ("trainer=cpu", "trainer.num_threads=1", "trainer.log_every_n_steps=2", "run_id=r")


@dataclass(frozen=True)
class Project:
    """What a user types for a project.

    Attributes:
        overrides: the module and the data.
        metric: it chooses the best checkpoint, and every epoch logs it.
        option: it has one value for each job of a sweep.
    """

    overrides: tuple[str, ...]
    metric: str
    option: str = "+task.lr=0.01,0.02"

    @property
    def monitored(self) -> tuple[str, ...]:
        mode = "max" if "acc" in self.metric else "min"
        return (f"task.monitor={self.metric}", f"task.mode={mode}")


def of_classes(module: str, data: str, metric: str) -> Project:
    overrides = (f"task._target_=projects.{module}", f"data._target_=projects.{data}")
    return Project(overrides, metric)


PROJECTS = {
    "autoencoder": of_classes("autoencoder.Autoencoder", "autoencoder.Images", "val_loss"),
    "backbone": of_classes("backbone.Transfer", "backbone.Images", "validation_accuracy"),
    "gan": of_classes("gan.GAN", "gan.Images", "g_loss"),
    "segmentation": Project(("task._target_=projects.segmentation.SegModel",), "valid_loss"),
    "hydra_template": Project(
        ("--config-dir", str(FOLDER / "configs"), "task=template", "data=template"),
        "val/acc",
        "task.optimizer.lr=0.01,0.02",
    ),
    "self_supervised": of_classes("self_supervised.BYOL", "self_supervised.Views", "ssl_loss"),
    "metric_learning": of_classes(
        "metric_learning.MetricLearner", "metric_learning.Images", "valid_accuracy"
    ),
    "vae": of_classes("vae.VAE", "vae.Images", "val_loss"),
}
every_project = pytest.mark.parametrize("name", PROJECTS)


def make_importable(folder):
    sys.path.insert(0, str(folder))


def train(name, *overrides, logs):
    project = PROJECTS[name]
    return go_on("train", *project.overrides, *project.monitored, *SHORT, *overrides, logs=logs)


def go_on(script, *overrides, logs):
    return succeed(script, *overrides, logs=logs, before=partial(make_importable, FOLDER.parent))


def by_plain_trainer(name: str, epochs: int) -> tuple[dict[str, float], Any]:
    """Train as the project's own script does; return its metrics and its module."""
    torch.set_num_threads(1)
    pl.seed_everything(SEED, verbose=False)
    module, data = parts_of(name)
    # Lockstep sets the seed again when the module is built.
    torch.manual_seed(SEED)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=2,
    )
    trainer.fit(module, datamodule=data)
    return {key: float(value) for key, value in trainer.callback_metrics.items()}, module


def parts_of(name: str) -> tuple[Any, Any]:
    if name == "hydra_template":
        parts = []
        for group in ("task", "data"):
            node = yaml.safe_load((FOLDER / f"configs/{group}/template.yaml").read_text())
            arguments = {
                key: value for key, value in node.items() if key not in ("monitor", "mode")
            }
            parts.append(instantiate(arguments, _convert_="all"))
        return parts[0], parts[1]
    targets = [text.partition("=")[2] for text in PROJECTS[name].overrides]
    module = locate(targets[0], "task._target_")()
    data = locate(targets[1], "data._target_")() if len(targets) > 1 else None
    return module, data


def weights_of(done: Any) -> dict[str, torch.Tensor]:
    last = next(done.folder.checkpoints.glob("last-*.ckpt"))
    return read_checkpoint(last)["state_dict"]


@pytest.mark.filterwarnings("ignore")
@every_project
def test_an_epoch_equals_that_of_a_plain_trainer(name, tmp_path):
    done = train(name, "trainer.max_epochs=1", logs=tmp_path)
    metrics, module = by_plain_trainer(name, epochs=1)
    # Lightning counts the steps of both optimizers of a GAN.
    assert done.record["steps"] == (16 if name == "gan" else 8)
    # The record's train/loss is the mean of the last steps, for every module.
    metrics.pop("train/loss", None)
    recorded = {key: done.record["metrics"][key] for key in metrics}
    assert recorded == pytest.approx(metrics, rel=1e-6)
    weights = weights_of(done)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(weights[key], value, rtol=1e-6, atol=1e-7)
    results = done.folder.page.read_text().partition("## How it was started")[0]
    assert "The run has no results" not in results


@pytest.mark.slow
@every_project
def test_a_stop_in_the_second_epoch_changes_nothing(name, tmp_path):
    whole = train(name, "trainer.max_epochs=3", logs=tmp_path / "whole")

    arguments = (*PROJECTS[name].overrides, *PROJECTS[name].monitored, *SHORT)
    slow = partial(make_importable_and_slow, FOLDER.parent)
    stopped = start_script(
        "train", *arguments, "trainer.max_epochs=3", logs=tmp_path / "stopped", before=slow
    )
    checkpoints = tmp_path / "stopped/train/runs/r/checkpoints"
    stopped.wait_for(lambda: any(checkpoints.glob("last-*.json")))
    stopped.process.terminate()
    done = stopped.done()
    assert done.code == 75, done.output

    again = go_on("train", "resume=r", logs=tmp_path / "stopped")
    assert again.record["steps"] == whole.record["steps"]
    expected = weights_of(whole)
    for key, value in weights_of(again).items():
        assert torch.equal(value, expected[key]), key


def make_importable_and_slow(folder):
    """Let a step take so long that a signal comes within an epoch."""
    import time

    make_importable(folder)
    training_step = pl.Trainer.fit

    def fit(trainer, *arguments, **options):
        trainer.callbacks.insert(0, Slow())
        return training_step(trainer, *arguments, **options)

    class Slow(pl.Callback):
        def on_train_batch_start(self, *_):
            time.sleep(0.3)

    pl.Trainer.fit = fit


@pytest.mark.slow
@every_project
def test_it_is_evaluated_on_two_ranks_and_in_a_sweep(name, tmp_path):
    train(name, "trainer.max_epochs=1", logs=tmp_path / "one")
    module, _ = parts_of(name)
    if is_overridden("test_step", module):
        evaluated = go_on("eval", "ckpt_path=r", logs=tmp_path / "one")
        trained = json.loads((tmp_path / "one/train/runs/r/run.json").read_text())
        for key, value in evaluated.record["metrics"].items():
            assert value == pytest.approx(trained["metrics"][key], rel=1e-6)

    # Each of a GAN's two steps uses a part of its parameters.
    unused = ["+trainer.strategy.find_unused_parameters=true"] if name == "gan" else []
    two = ("trainer=ddp_sim", "trainer.max_epochs=1", *unused)
    ranks = train(name, *two, logs=tmp_path / "two")
    assert ranks.record["world_size"] == 2
    # The template halves its batch on two ranks, and a GAN has two steps a batch.
    assert ranks.record["steps"] == (8 if name in ("hydra_template", "gan") else 4)

    project = PROJECTS[name]
    overrides = (*project.overrides, *project.monitored, *SHORT[:3], "trainer.max_epochs=1")
    jobs = go_on("train", "-m", *overrides, project.option, logs=tmp_path / "sweep")
    records = [json.loads(path.read_text()) for path in (tmp_path / "sweep").rglob("run.json")]
    assert len(records) == 2
    assert project.metric in jobs.output
