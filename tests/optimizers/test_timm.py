"""Any optimizer of timm, with groups; unknown names and options are refused."""

import pytest
import torch

from lockstep.runs.errors import UserError
from optimizers.timm import timm_optimizer


def weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))]


@pytest.mark.parametrize(
    ("opt", "name"), [("lamb", "Lamb"), ("lion", "Lion"), ("nadamw", "NAdamW"), ("adopt", "Adopt")]
)
def test_it_is_the_one_that_was_named_and_keeps_the_groups(opt, name):
    matrix, bias = weights()
    groups = [{"params": [matrix], "lr": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = timm_optimizer(groups, opt=opt, lr=0.1, weight_decay=0.2)
    assert type(optimizer).__name__ == name
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.2), (0.1, 0.0)]


def test_options_reach_the_optimizer():
    assert timm_optimizer(weights(), opt="lamb", betas=(0.8, 0.9)).param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"opt": "lamp"}, "optimizer.opt=lamp: timm has no optimizer of that name; it has lamb"),
        ({}, "optimizer.opt=None: timm has no optimizer"),
        ({"opt": "lamb", "nonsense": 1}, "timm's lamb cannot be built.*nonsense"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        timm_optimizer(weights(), **options)
