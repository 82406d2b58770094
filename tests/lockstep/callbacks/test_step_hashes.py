"""Step hashes: a bit flipped anywhere in a step is found there and named; over ranks and a resume the file is one."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lockstep.callbacks.step_hashes import StepHashes
from lockstep.runs.step_hashes import first_difference, read_hashes
from runs import run_door

STEPS, BATCH = 7, 4
WORDS = ("data=synthetic", "data.num_images=106", "data.num_val=10", "data.num_test_images=10",
         "data.image_size=16", "data.global_batch_size=16", "trainer=cpu", "trainer.max_epochs=2",
         "test=false", "trainer.log_every_n_steps=4", "trainer.record_hashes=true")  # fmt: skip


def flip(values: torch.Tensor) -> None:
    """Turn over the lowest bit of the last value, in place."""
    values.view(-1).view(torch.int32)[-1] ^= 1


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Flip(Callback):
    """One bit in the fifth step (counted from 1)."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 4 and self.what in ("images", "labels"):
            images, labels = batch
            if self.what == "images":
                flip(images[2])
            else:
                labels[3] = (labels[3] + 1) % 3

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 4 and self.what == "gradients":
            flip(pl_module.net[3].weight.grad)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != 5:
            return
        if self.what == "loss":
            flip(outputs["loss"])
        if self.what in ("weights", "buffers"):
            flip(pl_module.net[1].bias.data if self.what == "weights" else pl_module.net[2].running_var)


def recorded(path, *callbacks):
    torch.manual_seed(1)
    images, labels = torch.randn(STEPS * BATCH, 1, 2, 4), torch.randint(0, 3, (STEPS * BATCH,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=BATCH)
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, log_every_n_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, StepHashes(path, global_batch_size=BATCH)],
    )  # fmt: skip
    trainer.fit(Net(), loader)
    return read_hashes(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("plain") / "hashes.bin")


def test_the_same_training_twice_has_no_difference(plain, tmp_path):
    again = recorded(tmp_path / "hashes.bin")
    assert first_difference(plain, again) == (None, STEPS, True)
    assert plain.rows[:, 0].tolist() == list(range(STEPS + 1))
    assert plain.head.gradients == ("1.weight", "1.bias", "2.weight", "2.bias", "3.weight", "3.bias")
    assert plain.head.weights[6:] == ("2.running_mean", "2.running_var", "2.num_batches_tracked")
    for part in ("images", "loss", "gradients", "weights"):  # none stands still, but for counts and step 0
        assert len(np.unique(plain.part(part)[1:])) == plain.part(part)[1:].size


@pytest.mark.parametrize(
    "what, found",
    [
        ("images", "in step 5: image 2 of the batch (counted from 0)"),
        ("labels", "in step 5: image 3 of the batch (counted from 0)"),
        ("loss", "in step 5: the loss, of the same images"),
        ("gradients", "in step 5: the gradient of 3.weight"),
        ("weights", "in step 5: the weight of 1.bias"),
        ("buffers", "in step 5: the weight of 2.running_var"),
    ],
)
def test_a_flipped_bit_is_named(plain, tmp_path, what, found):
    seeded = recorded(tmp_path / "hashes.bin", Flip(what))
    difference, _, _ = first_difference(plain, seeded)
    assert str(difference) == found


def test_nothing_is_read_from_the_device_between_log_points(tmp_path, monkeypatch):
    reads = []
    real = StepHashes._write
    monkeypatch.setattr(StepHashes, "_write", lambda self, t: (reads.append(t.global_step), real(self, t))[1])
    recorded(tmp_path / "hashes.bin")
    assert reads == [0, 3, 6, 7, 7]


@pytest.mark.slow
def test_two_ranks_and_micro_batches_see_the_same_images_in_the_same_order(tmp_path):
    one = run_door("train", *WORDS, logs=tmp_path / "one")
    two = run_door("train", *WORDS, "trainer=ddp_sim", "trainer.accumulate_grad_batches=2", logs=tmp_path / "two")
    assert (one.code, two.code) == (0, 0), one.output + two.output
    alone, both = read_hashes(one.folder.hashes), read_hashes(two.folder.hashes)
    assert first_difference(alone, both) == (None, 12, False)
    assert np.array_equal(alone.part("images"), both.part("images")) and len(np.unique(alone.part("images"))) > 96
    assert both.rows[1:, 1:3].tolist() == [[2, 2]] * 12


@pytest.mark.slow
def test_a_resumed_run_has_the_rows_of_one_that_was_not_stopped(tmp_path):

    first = run_door("train", *WORDS, "run_id=stopped", "trainer.max_epochs=1", "scheduler=none", logs=tmp_path)
    assert first.code == 0, first.output
    assert read_hashes(first.folder.hashes).rows.shape[0] == 7
    again = run_door("train", "resume=stopped", "trainer.max_epochs=2", logs=tmp_path)
    assert again.code == 0, again.output
    rows = read_hashes(first.folder.hashes)
    assert rows.rows[:, 0].tolist() == list(range(13))
    flat = run_door("train", *WORDS, "run_id=flat", "scheduler=none", logs=tmp_path)
    assert flat.code == 0 and first_difference(read_hashes(flat.folder.hashes), rows) == (None, 12, True)


@pytest.mark.slow
def test_sharded_weights_are_compared_by_shards(tmp_path):
    done = [
        run_door("train", *WORDS, f"trainer={name}", logs=tmp_path / f"{i}")
        for i, name in enumerate(("fsdp_sim", "fsdp_sim", "ddp_sim"))
    ]
    assert [one.code for one in done] == [0, 0, 0], done[0].output
    sharded, again, whole = (read_hashes(one.folder.hashes) for one in done)
    assert first_difference(sharded, again) == (None, 12, True)
    assert first_difference(sharded, whole) == (None, 12, False)
