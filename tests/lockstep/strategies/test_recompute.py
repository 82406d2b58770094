"""Activations that are computed again leave losses and weights as they are, under every strategy."""

import copy

import pytest
import torch
from torch import nn

from lockstep.runs.errors import UserError
from lockstep.strategies.recompute import recompute_activations
from strategy_runs import one, worst


def test_one_process_has_the_same_losses_and_weights():
    expected, found = one(), one(recompute=True)
    assert found["losses"] == expected["losses"] and worst(found["weights"], expected["weights"]) == 0
    assert found["val"] == expected["val"]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).tanh()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Counting(), Counting())

    def forward(self, x):
        return self.blocks(x)

    def shard_units(self):
        return list(self.blocks)


def test_a_unit_computes_twice_in_training_once_in_evaluation_and_so_does_a_copy():
    net = Net()
    names = list(net.state_dict())
    recompute_activations(net)
    assert list(net.state_dict()) == names and all(isinstance(block, Counting) for block in net.blocks)
    for each in (net, copy.deepcopy(net)):
        each(torch.ones(2, 4)).sum().backward()
        assert [block.calls for block in each.blocks] == [2, 2]
        assert all(p.grad is not None for p in each.parameters())
        with torch.no_grad():
            each(torch.ones(2, 4))
        assert [block.calls for block in each.blocks] == [3, 3]
        each.blocks[0].calls = each.blocks[1].calls = 0


class Norms(Net):
    def __init__(self):
        super().__init__()
        self.blocks.append(nn.BatchNorm1d(4))


def test_what_cannot_be_computed_again_is_refused():
    with pytest.raises(UserError, match="BatchNorm's statistics twice"):
        recompute_activations(Norms())
    with pytest.raises(UserError, match="needs shard_units.. of Linear"):
        recompute_activations(nn.Linear(1, 1))
