"""The moving average is what is validated and saved, and a stop in a validation leaves each weight
in its place.
"""

import copy
import signal
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from faults import signal_at_step
from kills import differences
from lockstep.callbacks.weight_average import WeightAverage, update_average
from lockstep.checkpoints.files import newest_whole
from lockstep.checkpoints.load import read_checkpoint
from runs import run_script

WORDS = ["experiment=quickstart", "trainer.ema_decay=0.9", "trainer.max_epochs=3", "data.global_batch_size=128",
         "trainer.num_threads=1", "data.eval_batch_size=16", "test=false", "~callbacks.hardware",
         "run_id=r"]  # fmt: skip
STATE = ("state_dict", "current_model_state", "averaging_state", "optimizer_states", "global_step")


def last_of(done):
    content = read_checkpoint(newest_whole(done.folder.checkpoints, kind="last"))
    return {key: content[key] for key in STATE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_decay_begins_small_and_it_stays_in_its_precision(dtype):
    torch.manual_seed(0)
    start = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    average = AveragedModel(start, use_buffers=True)
    trained = copy.deepcopy(start).to(dtype)
    expected = None
    for step, decay in enumerate([0, 2 / 11, 3 / 12, 0.3]):  # (1 + n) / (10 + n), at most 0.3
        for parameter in trained.parameters():
            parameter.data.add_(0.1 * (step + 1))
        trained[1].num_batches_tracked += 1
        update_average(average, 0.3, trained)
        new = trained[0].weight.float()
        expected = new.clone() if expected is None else decay * expected + (1 - decay) * new
    assert average.n_averaged == 4 and average.module[1].num_batches_tracked == 4
    assert average.module[0].weight.dtype == torch.float32
    torch.testing.assert_close(average.module[0].weight.data, expected, rtol=1e-5, atol=1e-6)


class Counting(pl.LightningModule):
    """Counts its validation batches in a buffer, as metrics of some tasks do."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
        self.register_buffer("batches", torch.zeros(()), persistent=False)
        self.counted = []
        self.weights = []

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_validation_epoch_start(self):
        self.batches.zero_()

    def validation_step(self, batch, batch_idx):
        self.batches += 1

    def on_validation_epoch_end(self):
        self.counted.append(float(self.batches))
        self.weights.append(self.net.weight.detach().clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_module_reads_what_it_counted_in_a_buffer():
    module = Counting()
    loader = DataLoader(torch.ones(12, 2), 4)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[WeightAverage(0.9)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader, loader)
    assert module.counted[-2:] == [3, 3]
    # After fit the module holds the average, which it was validated with.
    assert torch.equal(module.weights[-1], module.net.weight)


@pytest.mark.slow
def test_a_run_stopped_in_validation_resumes_the_same_weights(tmp_path):
    words = [*WORDS, "trainer=ddp_sim"]
    whole = run_script("train", *words, logs=tmp_path / "whole")
    assert whole.code == 0, whole.output
    fault = partial(signal_at_step, 1, signal.SIGTERM, hook="on_validation_batch_end")
    stopped = run_script("train", *words, logs=tmp_path / "stopped", before=fault)
    assert stopped.code == 75 and stopped.record["phase"] == "validation", stopped.output
    again = run_script("train", *words, "resume=auto", logs=tmp_path / "stopped")
    assert again.code == 0, again.output
    assert differences(last_of(again), last_of(whole)) == []
    assert not list(again.folder.checkpoints.glob("*-before-*")), "its step was saved twice"
    assert again.record["metrics"]["val/acc"] == whole.record["metrics"]["val/acc"]


def test_the_average_is_saved_and_learns_within_few_steps(tmp_path):
    """With a constant decay of 0.9995 most of it would be the initial weights after 60 steps."""
    done = run_script(
        "train",
        *WORDS,
        "trainer=cpu",
        "trainer.ema_decay=0.9995",
        "trainer.max_epochs=6",
        logs=tmp_path,
    )
    state = last_of(done)
    trained, averaged = state["current_model_state"], state["state_dict"]
    assert averaged.keys() == trained.keys() and any(
        not torch.equal(averaged[name], trained[name]) for name in averaged
    )
    assert done.record["metrics"]["val/acc"] > 0.9
