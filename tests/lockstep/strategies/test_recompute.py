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


class Net(nn.Sequential):
    def shard_units(self):
        return list(self)


def test_a_unit_computes_twice_in_training_once_in_evaluation_and_so_does_a_copy():
    net = Net(Counting(), Counting())
    names = list(net.state_dict())
    recompute_activations(net)
    assert list(net.state_dict()) == names and all(isinstance(block, Counting) for block in net)
    for each in (copy.deepcopy(net), net):
        each(torch.ones(2, 4)).sum().backward()
        assert [block.calls for block in each] == [2, 2]
        assert all(p.grad is not None for p in each.parameters())
        with torch.no_grad():
            each(torch.ones(2, 4))
        assert [block.calls for block in each] == [3, 3]


def test_what_cannot_be_computed_again_is_refused():
    with pytest.raises(UserError, match="BatchNorm's statistics twice"):
        recompute_activations(Net(Counting(), nn.BatchNorm1d(4)))
    with pytest.raises(UserError, match="needs shard_units.. of Linear"):
        recompute_activations(nn.Linear(1, 1))
