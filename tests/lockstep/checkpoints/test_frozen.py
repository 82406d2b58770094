"""A run resumed after layers were unfrozen trains them, bit for bit as a run without a stop."""

import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import strategy_runs as tiny
from local_ranks import run_ranks
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.checkpoints.files import Sidecar, newest_whole, sidecar_path, write_sidecar
from lockstep.checkpoints.io import write_checkpoint
from lockstep.checkpoints.load import read_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")

BATCHES = 6


class Transfer(pl.LightningModule):
    """A backbone with BatchNorm and a head; the optimizer gets what is trainable at the start."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.head(self.backbone(x)) - y).square().mean()

    validation_step = training_step
    test_step = training_step

    def configure_optimizers(self):
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trainable, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class UnfreezeOnce(pl.Callback):
    """A user's own callback, without a state."""

    def setup(self, trainer, pl_module, stage):
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True)
            group = {"params": list(pl_module.backbone.parameters()), "lr": 0.001}
            trainer.optimizers[0].add_param_group(group)


CALLBACKS = {
    "lightning": lambda: BackboneFinetuning(1, backbone_initial_lr=0.001, train_bn=False),
    "own": UnfreezeOnce,
}


class Killed(Exception):
    pass


class KillAt(pl.Callback):
    def __init__(self, epoch, batch):
        self.at = (epoch, batch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            raise Killed


def samples():
    x = torch.randn(4 * BATCHES, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def train(folder, *callbacks, resume=False, module=None):
    pl.seed_everything(1, verbose=False)
    module = module or Transfer()
    trainer = pl.Trainer(
        accelerator="cpu",
        callbacks=[*callbacks, Checkpoints(folder, every_minutes=0)],
        log_every_n_steps=1,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    path = newest_whole(folder) if resume else None
    trainer.fit(module, DataLoader(samples(), 4, shuffle=True), ckpt_path=path)
    return module


def train_until(folder, epoch, batch, *callbacks):
    with pytest.raises(Killed):
        train(folder, *callbacks, KillAt(epoch, batch))


def assert_equal(resumed, whole):
    expected = whole.state_dict()
    for name, value in resumed.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("epoch", "batch"), [(0, 3), (1, 0), (1, 3), (2, 0)], ids=["before", "at", "in", "after"]
)
@pytest.mark.parametrize("name", CALLBACKS)
def test_a_resume_around_an_unfreezing_equals_the_whole_run(name, epoch, batch, tmp_path):
    whole = train(tmp_path / "whole", CALLBACKS[name]())
    train_until(tmp_path / "r", epoch, batch, CALLBACKS[name]())
    resumed = train(tmp_path / "r", CALLBACKS[name](), resume=True)
    assert_equal(resumed, whole)
    assert all(parameter.requires_grad for parameter in resumed.parameters())


def test_a_resume_says_that_the_checkpoint_trains_frozen_layers(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    train_until(tmp_path, 1, 3, UnfreezeOnce())
    assert not caplog.messages or "freezes" not in caplog.text
    train(tmp_path, UnfreezeOnce(), resume=True)
    [line] = [line for line in caplog.messages if "freezes" in line]
    assert "4 parameters (backbone.0.weight, backbone.0.bias, backbone.1.weight, …)" in line


def test_a_resume_freezes_what_the_run_had_frozen(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lockstep")
    module = Transfer()
    module.head.bias.requires_grad_(False)
    with pytest.raises(Killed):
        train(tmp_path, KillAt(1, 3), module=module)
    unfrozen = Transfer()
    unfrozen.configure_optimizers = lambda: torch.optim.Adam(
        parameter for name, parameter in unfrozen.named_parameters() if name != "head.bias"
    )
    resumed = train(tmp_path, resume=True, module=unfrozen)
    assert not resumed.head.bias.requires_grad
    assert "1 parameters (head.bias) that the module as built trains are frozen" in caplog.text


def test_a_test_of_a_checkpoint_leaves_freezing_alone(tmp_path):
    train(tmp_path, UnfreezeOnce())
    module = Transfer()
    module.backbone.requires_grad_(False)
    trainer = pl.Trainer(accelerator="cpu", callbacks=[Checkpoints(tmp_path)], logger=False)
    path = newest_whole(tmp_path)
    trainer.test(module, DataLoader(samples(), 4), ckpt_path=path, verbose=False)
    assert not any(parameter.requires_grad for parameter in module.backbone.parameters())


def test_a_checkpoint_of_an_earlier_version_still_resumes(tmp_path):
    train_until(tmp_path, 0, 3, UnfreezeOnce())
    path = newest_whole(tmp_path)
    checkpoint = read_checkpoint(path)
    del checkpoint["lockstep"]["frozen"]
    sidecar_path(path).unlink()
    write_checkpoint(checkpoint, path)
    write_sidecar(path, Sidecar(checkpoint["global_step"]))
    whole = train(tmp_path / "whole", UnfreezeOnce())
    assert_equal(train(tmp_path, UnfreezeOnce(), resume=True), whole)


class UnfreezeBlocks(UnfreezeOnce):
    """The same for the net of `strategy_runs`."""

    def setup(self, trainer, pl_module, stage):
        pl_module.net.blocks.requires_grad_(False)

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            pl_module.net.blocks.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": [*pl_module.net.blocks.parameters()]})


def sgd_of_trainable(parameters):
    return tiny.sgd([parameter for parameter in parameters if parameter.requires_grad])


def resumed_on_ranks(cluster, name, folder):
    """Train two epochs, resume for a third; return the weights of the resume and of one run."""
    settings = {"steps": 3, "optimizer": sgd_of_trainable}

    def fit(folder, epochs, resume=None):
        callbacks = [UnfreezeBlocks(), Checkpoints(folder, "held_out_loss", "min")]
        return tiny.fit(
            cluster, name, epochs=epochs, callbacks=callbacks, resume=resume, **settings
        )["weights"]

    whole = fit(folder / "whole", 3)
    fit(folder / "r", 2)
    return whole, fit(folder / "r", 3, str(newest_whole(folder / "r", "last")))


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_resume_on_two_ranks_equals_the_whole_run(name, tmp_path):
    [(whole, resumed), _] = run_ranks(resumed_on_ranks, 2, name, tmp_path)
    assert tiny.worst(resumed, whole) == 0
