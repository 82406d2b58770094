"""Leaving out what nobody gains from changes nothing that a callback sees."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.lean_hooks import STEP_HOOKS, NoProfiler, skip_empty_hooks


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Listener(Callback):
    """Overrides two of the step's hooks and one that comes once an epoch."""

    def __init__(self):
        self.heard = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.heard.append(f"start {batch_idx}")

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.heard.append("step")

    def on_train_epoch_end(self, trainer, pl_module):
        self.heard.append("epoch")


def heard(lean: bool) -> list[str]:
    listener, silent = Listener(), Callback()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[silent, listener], profiler=NoProfiler() if lean else None,
    )  # fmt: skip
    if lean:
        skip_empty_hooks(trainer.callbacks)
        assert all(getattr(silent, name) is None for name in STEP_HOOKS)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(3, 2), batch_size=1))
    return listener.heard


@pytest.mark.filterwarnings("ignore")
def test_overridden_hooks_are_called_as_before():
    expected = ["start 0", "step", "start 1", "step", "start 2", "step", "epoch"]
    assert heard(lean=True) == heard(lean=False) == expected


def test_every_hook_of_a_step_exists():
    """Fails where a release of Lightning renames one."""
    assert all(callable(getattr(Callback, name)) for name in STEP_HOOKS)
