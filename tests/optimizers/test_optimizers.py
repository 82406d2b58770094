"""The optimizers, airbench's among them."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import nn

from local_ranks import meet, run_ranks
from lockstep.config.hydra_versions import instantiate, version_base
from lockstep.process.errors import UserError
from optimizers.airbench import AirbenchMuon, orthogonalise
from optimizers.timm import timm_optimizer

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "optimizer"


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_each_option_builds_an_optimizer_that_steps_and_loads(name, tmp_path):
    with initialize_config_dir(str(CONFIGS), **version_base()):
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


def test_it_is_the_optimizer_that_was_named():
    matrix, bias = weights()
    groups = [{"params": [matrix], "lr": 0.5}, {"params": [bias], "weight_decay": 0.0}]
    optimizer = timm_optimizer(groups, opt="nadamw", lr=0.1, weight_decay=0.2, betas=(0.8, 0.9))
    assert type(optimizer).__name__ == "NAdamW" and optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.5, 0.2),
        (0.1, 0.0),
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"opt": "lamp"}, "optimizer.opt=lamp: timm has no optimizer of that name; it has lamb"),
        ({"opt": "lookahead_lamp"}, "optimizer.opt=lookahead_lamp: timm has no .* it has lamb"),
        ({"opt": "lookahead_adamw"}, "Lookahead lacks the hooks .* Pass optimizer.opt=adamw"),
        ({}, "optimizer.opt=None: timm has no optimizer"),
        ({"opt": "adahessian"}, "needs second derivatives"),
        ({"opt": "lamb", "momentum": 0.5}, "optimizer.momentum: lamb of timm does not take it"),
        ({"opt": "lion", "eps": 1e-3}, "optimizer.eps: lion of timm does not take it"),
        ({"opt": "sgd", "betas": (0.9, 0.9)}, "optimizer.betas: sgd of timm does not"),
        ({"opt": "muon", "fallback_list": ["head"]}, "optimizer.fallback_list does nothing here"),
        ({"opt": "lamb", "nonsense": 1}, "timm's lamb cannot be built.*nonsense"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(UserError, match=says):
        timm_optimizer(weights(), **options)


# Airbench's update against singular values and a step by hand, sharded and resumed.


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.BatchNorm2d(8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(128, 12),
        nn.GELU(),
        nn.Linear(12, 3),
    )


def train(net, optimizer, steps, seed):
    """Return the loss of the last step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        images = torch.randn(16, 2, 6, 6, generator=generator).to(next(net.parameters()).dtype)
        labels = (images[:, 0].mean((1, 2)) > 0).long() + (images[:, 1].mean((1, 2)) > 0).long()
        loss = nn.functional.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("shape", [(8, 20), (20, 8)])
def test_orthogonalise_makes_singular_values_alike(shape):
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    values = torch.linalg.svdvals(orthogonalise(matrix, iterations=6))
    assert values.min() > 0.6 and values.max() < 1.3
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ orthogonalise(matrix, iterations=6) @ vh.T
    assert torch.allclose(inner, torch.diag(inner.diag()), atol=1e-9)  # the directions stay


def test_hidden_matrices_take_muon_head_and_vectors_take_sgd():
    net = network()
    optimizer = AirbenchMuon(net.named_parameters(), lr=0.1, head_lr=0.2, vector_lr=0.3)
    names = {id(p): name for name, p in net.named_parameters()}
    groups = [
        ({names[id(p)] for p in group["params"]}, group["kind"], group["lr"])
        for group in optimizer.param_groups
    ]
    assert groups == [
        ({"0.weight", "4.weight"}, "muon", 0.1),
        ({"6.weight"}, "sgd", 0.2),
        ({"0.bias", "1.weight", "1.bias", "4.bias", "6.bias"}, "sgd", 0.3),
    ]


def test_a_step_by_hand():
    head, hidden = (
        nn.Parameter(torch.tensor([[2.0, 1.0]])),
        nn.Parameter(torch.tensor([[3.0, 0.0], [0.0, 4.0]])),
    )
    optimizer = AirbenchMuon(
        [("hidden", hidden), ("head", head)],
        lr=0.5,
        head_lr=0.1,
        sgd_momentum=0.5,
        weight_decay=0.2,
        iterations=0,
    )
    hidden.grad, head.grad = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, -1.0]])
    optimizer.step()
    assert torch.allclose(
        head, torch.tensor([[2.0, 1.0]]) * 0.98 - 0.1 * torch.tensor([[1.5, -1.5]])
    )
    held = torch.tensor([[3.0, 0.0], [0.0, 4.0]]) * 2**0.5 / 5  # norm held at sqrt(outputs)
    assert torch.allclose(hidden, held - 0.5 * torch.eye(2) / 2**0.5, atol=1e-6)


def test_airbench_trains_a_hidden_weight_of_zeros():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    nn.init.zeros_(net[0].weight)
    optimizer = AirbenchMuon(net.named_parameters(), lr=0.1)
    for _ in range(2):
        net(torch.eye(4)).sum().backward()
        optimizer.step()
    assert net[0].weight.isfinite().all() and net[0].weight.norm() > 0


def test_muon_leaves_pretrained_weights_at_rate_zero():
    with initialize_config_dir(str(CONFIGS), **version_base()):
        factory = instantiate(compose("muon", ["lr=0"]), _convert_="all")
    net = network()
    before = {name: value.clone() for name, value in net.named_parameters()}
    train(net, factory(net.parameters()), 2, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in net.named_parameters())


def trained_in_double(net):
    train(net, AirbenchMuon(net.named_parameters()), 3, seed=3)
    found = dict(net.named_parameters())
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).tolist()
        for name, p in found.items()
    }


def trained_in_shards(cluster):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    meet(cluster)
    net = network().double()
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return trained_in_double(net)


@pytest.mark.slow
def test_sharded_parameters_train_as_whole_ones():
    expected = trained_in_double(network().double())
    for sharded in run_ranks(trained_in_shards, 2):
        for name, value in expected.items():
            torch.testing.assert_close(
                torch.tensor(sharded[name]), torch.tensor(value), rtol=1e-9, atol=1e-12
            )
