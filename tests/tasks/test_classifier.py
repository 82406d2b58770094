"""The module's choice of an optimizer's kernel, and its counts."""

from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from optimizers.muon import Muon
from tasks.classifier import ImageClassifier


def module(optimizer, precision="32-true"):
    torch.manual_seed(0)
    classifier = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double(), optimizer, num_classes=3)
    classifier._trainer = SimpleNamespace(precision=precision, strategy=SimpleNamespace())
    return classifier


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_that_have_one_kernel_for_all_parameters_use_it(optimizer):
    assert module(partial(optimizer, lr=0.1)).configure_optimizers().param_groups[0]["fused"] is True


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        (partial(torch.optim.AdamW, lr=0.1, fused=False), "32-true"),
        (partial(torch.optim.AdamW, lr=0.1, foreach=True), "32-true"),
        (partial(torch.optim.AdamW, lr=0.1), "16-mixed"),  # clipping needs gradients without their scale
        (partial(torch.optim.Adadelta, lr=0.1), "32-true"),
        (partial(Muon, lr=0.1), "32-true"),
    ],
)
def test_not_where_something_else_is_stated_or_it_would_not_do(optimizer, precision):
    assert not module(optimizer, precision).configure_optimizers().param_groups[0].get("fused")


@pytest.mark.parametrize(
    ("optimizer", "precision", "kernel"),
    [
        (torch.optim.AdamW, "32-true", "fused"),
        (torch.optim.AdamW, "16-mixed", "foreach"),
        (torch.optim.SGD, "32-true", "foreach"),
        (torch.optim.Adadelta, "32-true", "foreach"),
    ],
)
def test_shards_get_the_kernel_that_dtensors_have(optimizer, precision, kernel):
    classifier = module(partial(optimizer, lr=0.1), precision)
    classifier.net[1].weight.full_tensor = lambda: None  # what tells a DTensor
    group = classifier.configure_optimizers().param_groups[0]
    assert [name for name in ("fused", "foreach") if group.get(name)] == [kernel]


@pytest.mark.parametrize("optimizer", [partial(torch.optim.SGD, momentum=0.9, nesterov=True), torch.optim.AdamW])
def test_it_makes_the_same_steps(optimizer):
    weights = []
    for kernel in ({}, {"foreach": False}):
        classifier = module(partial(optimizer, lr=0.1, weight_decay=0.01, **kernel))
        stepper = classifier.configure_optimizers()
        for _ in range(5):
            stepper.zero_grad()
            classifier.training_step((torch.ones(2, 1, 2, 2).double(), torch.tensor([0, 2])), 0).backward()
            stepper.step()
        weights.append(classifier.net[1].weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("saved, loaded", [("16-mixed", "32-true"), ("32-true", "16-mixed")])
def test_a_checkpoint_does_not_bring_its_kernel(saved, loaded):
    def step(classifier, stepper):
        stepper.zero_grad()
        classifier.training_step((torch.ones(2, 1, 2, 2).double(), torch.tensor([0, 2])), 0).backward()
        stepper.step()

    first, second = (module(partial(torch.optim.AdamW, lr=0.1), precision) for precision in (saved, loaded))
    one, other = first.configure_optimizers(), second.configure_optimizers()
    step(first, one)
    second.load_state_dict(first.state_dict())
    own = other.param_groups[0]["fused"]
    other.load_state_dict(deepcopy(one.state_dict()))  # it would share the moments
    assert other.param_groups[0]["fused"] == own != one.param_groups[0]["fused"]
    step(first, one)
    step(second, other)
    torch.testing.assert_close(first.net[1].weight, second.net[1].weight, rtol=1e-13, atol=1e-13)


def test_hits_of_training_are_counted_without_looking_at_them_and_taken_once():
    classifier = ImageClassifier(nn.Flatten(), num_classes=3)
    logits = torch.eye(3)[[0, 1, 2, 2]].view(4, 1, 1, 3).requires_grad_()
    classifier.training_step((logits, torch.tensor([0, 1, 1, 2])), 0)
    mixed = 0.6 * torch.eye(3)[[0, 0, 0, 2]] + 0.4 * torch.eye(3)[[1, 1, 1, 1]]
    classifier.training_step((logits, mixed), 1)
    assert classifier.take_sums("train")["train/acc"].tolist() == [5, 8]
    assert classifier.take_sums("train") == {}


def test_hits_before_a_checkpoint_in_mid_epoch_count_after_it():
    strategy = SimpleNamespace(reduce=lambda counts, reduce_op: 2 * counts, root_device="cpu")
    classifier = ImageClassifier(nn.Flatten(), num_classes=3)
    classifier._trainer = SimpleNamespace(strategy=strategy, is_global_zero=True)
    classifier.training_step((torch.eye(3).view(3, 1, 1, 3), torch.tensor([0, 1, 1])), 0)
    checkpoint = {}
    classifier.on_save_checkpoint(checkpoint)
    assert checkpoint == {"train_sums": {"train/acc": [4, 6]}}
    old = {"train_counts": [4, 6]}
    for is_zero, expected, saved in ((True, [4, 6], checkpoint), (False, [0, 0], checkpoint), (True, [4, 6], old)):
        other = ImageClassifier(nn.Flatten(), num_classes=3)
        other._trainer = SimpleNamespace(strategy=strategy, is_global_zero=is_zero)
        other.on_load_checkpoint(saved)
        assert other.take_sums("train")["train/acc"].tolist() == expected
