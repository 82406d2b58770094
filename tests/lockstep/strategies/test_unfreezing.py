"""Layers that a callback freezes or unfreezes during a training are trained as in one process."""

import weakref

import lightning.pytorch as pl
import pytest

import strategy_runs as tiny
from local_ranks import run_ranks
from lockstep.process.errors import UserError

STRATEGIES = ("ddp", "allreduce", "fsdp")


class SetTrainable(pl.Callback):
    """Make layers of the net trainable in some epochs only, as Lightning's finetuning does."""

    def __init__(self, layers: tuple[str, ...], epochs: set[int]) -> None:
        self.layers = layers
        self.epochs = epochs

    def setup(self, trainer, pl_module, stage):
        self.set(pl_module, 0)

    def on_train_epoch_start(self, trainer, pl_module):
        self.set(pl_module, trainer.current_epoch)

    def set(self, pl_module, epoch):
        for layer in self.layers:
            getattr(pl_module.net, layer).requires_grad_(epoch in self.epochs)


BACKBONE = ("embed", "blocks", "token")
UNFREEZES = {"epochs": 2, "callbacks": [SetTrainable(BACKBONE, {1})]}
RUNS = {
    "unfreezes": UNFREEZES,
    "unfreezes, accumulated": {**UNFREEZES, "accumulate": 2},
    "freezes and unfreezes": {
        "epochs": 3,
        "callbacks": [SetTrainable(("blocks", "head"), {0, 2})],
    },
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_layers_frozen_for_some_epochs_equal_one_process(name):
    runs = [(name, {"steps": 3, **settings}) for settings in RUNS.values()]
    for case, of_ranks in zip(RUNS, tiny.ranks_all(2, runs), strict=True):
        settings = {"steps": 3, **RUNS[case]}
        accumulate = settings.pop("accumulate", 1)
        expected = tiny.one(**settings)
        assert tiny.difference(of_ranks, expected, accumulate) < 1e-12, case
        if name != "fsdp":
            # Every rank of FSDP gathers the weights, but only rank 0 keeps them.
            assert tiny.worst(of_ranks[1]["weights"], expected["weights"]) < 1e-12, case


class KeepFirstWrapper(pl.Callback):
    """Look after the unfreezing whether the wrapper of the first epoch is still in memory."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            self.first = weakref.ref(trainer.strategy.model)
        else:
            self.is_kept = self.first() is not None


def is_first_wrapper_kept(cluster):
    callback = KeepFirstWrapper()
    unfreeze = SetTrainable(BACKBONE, {1})
    tiny.fit(cluster, "ddp", steps=2, epochs=2, callbacks=[unfreeze, callback])
    return callback.is_kept


def test_an_unfreezing_frees_the_wrapper_of_before():
    assert run_ranks(is_first_wrapper_kept, 2) == [False, False]


class UnfreezesInItsStep(tiny.Classifier):
    def training_step(self, batch, batch_idx):
        self.net.blocks.requires_grad_(True)
        return super().training_step(batch, batch_idx)


def fit_that_unfreezes_in_its_step(cluster):
    trainer = tiny.trainer_of(cluster, tiny.strategy_of("ddp"))
    module = UnfreezesInItsStep(tiny.TinyNet(), tiny.sgd)
    module.net.blocks.requires_grad_(False)
    with pytest.raises(UserError, match="unfreeze them in on_train_epoch_start"):
        trainer.fit(module, tiny.Batches(2, cluster.rank, cluster.world_size, 1))
    return "refused"


def test_ddp_refuses_layers_unfrozen_within_a_step():
    assert run_ranks(fit_that_unfreezes_in_its_step, 2) == ["refused"] * 2
