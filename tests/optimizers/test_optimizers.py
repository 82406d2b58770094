"""Each optimizer of configs/ states its defaults, steps and loads; timm's by name; unknown names are refused."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lockstep.runs.errors import UserError
from optimizers.timm import timm_optimizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "optimizer"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_each_option_builds_an_optimizer_that_steps_and_loads(name, tmp_path):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        needed = ["opt=lamb"] if name == "timm" else []
        factory = instantiate(compose(name, needed), _convert_="all")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    named = getattr(factory.func, "takes_named_parameters", False)
    optimizer = factory(net.named_parameters() if named else net.parameters())
    before = net(torch.ones(8, 4)).square().mean()
    before.backward()
    optimizer.step()
    assert net(torch.ones(8, 4)).square().mean() < before
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(saved["state"]) == 4 and saved["param_groups"][0]["lr"] == factory.keywords["lr"]


def weights():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))]


def test_it_is_the_one_that_was_named_and_keeps_groups_and_options():
    matrix, bias = weights()
    groups = [{"params": [matrix], "lr": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = timm_optimizer(groups, opt="nadamw", lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    assert type(optimizer).__name__ == "NAdamW" and optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.2), (0.1, 0.0)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"opt": "lamp"}, "optimizer.opt=lamp: timm has no optimizer of that name; it has lamb"),
        ({}, "optimizer.opt=None: timm has no optimizer"),
        ({"opt": "adahessian"}, "needs second derivatives"),
        ({"opt": "lamb", "nonsense": 1}, "timm's lamb cannot be built.*nonsense"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        timm_optimizer(weights(), **options)
