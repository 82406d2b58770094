"""Gradients averaged by hand, where ranks use different parts of the net."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader

import strategy_runs as tiny
from local_ranks import run_ranks


class Experts(pl.LightningModule):
    """Each rank uses another layer of equal size, and no rank uses the last one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(3))
        self.gradients = []

    def training_step(self, batch, batch_idx):
        return self.layers[self.global_rank](batch).sum()

    def on_before_optimizer_step(self, optimizer):
        for layer in self.layers:
            gradient = layer.weight.grad
            self.gradients.append(None if gradient is None else gradient[0].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def gradients_of_experts(cluster, steps):
    """Train on rows of ones on rank 0, and of fours on rank 1."""
    module = Experts()
    trainer = tiny.trainer_of(cluster, tiny.strategy_of("allreduce"))
    rows = torch.full((steps, 2), [1.0, 4.0][cluster.rank], dtype=torch.float64)
    trainer.fit(module, DataLoader(rows))
    return module.gradients


def test_ranks_that_use_different_layers_average_each_layer():
    expected = [[0.5, 0.5], [2.0, 2.0], None]
    for gradients in run_ranks(gradients_of_experts, 2, 2):
        assert gradients == expected * 2
