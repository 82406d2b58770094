"""The net cut into stages trains as the whole one does, and its checkpoints are those of the whole
one.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from local_ranks import local_cluster
from lockstep.process.errors import UserError
from models.alexnet import AlexNetBN
from strategies.model_parallel import ModelParallel, balance_groups, cut_into_groups, parse_devices
from strategy_runs import difference, fit, one
from tasks.classifier import ImageClassifier

TWO = ["cpu", "cpu"]


def split(**settings):
    own = {"stage_devices": TWO, **settings.pop("own", {})}
    return fit(local_cluster(0, 1, 0), "model_parallel", own=own, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate": 2},
        {"clip": 0.5},
        {"own": {"micro_batches": 5}},
        {"own": {"stage_devices": ["cpu"] * 4}},
    ],
    ids=str,
)
def test_equals_one_process_in_float64(settings):
    found = split(**settings)
    expected = one(clip=settings.get("clip"))
    assert difference([found], expected, settings.get("accumulate", 1)) < 1e-12


def test_checkpoints_go_both_ways(tmp_path):
    split(save=tmp_path / "split.ckpt")
    one(save=tmp_path / "whole.ckpt")
    states = [
        torch.load(tmp_path / name, weights_only=True)["state_dict"]
        for name in ("split.ckpt", "whole.ckpt")
    ]
    assert states[0].keys() == states[1].keys()
    tests = (
        one(test=True, resume=tmp_path / "split.ckpt"),
        split(test=True, resume=tmp_path / "whole.ckpt"),
    )
    assert tests[0]["test"] == tests[1]["test"]
    more = {"epochs": 2, "resume": tmp_path / "split.ckpt"}
    assert difference([split(**more)], one(**more)) < 1e-12


def test_balanced_cut_equals_exhaustive_search():
    generator = torch.Generator().manual_seed(1)
    for parts in (2, 3, 4) * 10:
        costs = torch.randint(0, 20, (7,), generator=generator).tolist()
        dearest = {
            cut: max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, 7)))
            for cut in itertools.combinations(range(1, 7), parts - 1)
        }
        assert dearest[tuple(balance_groups(costs, parts))] == min(dearest.values())


class Stages(nn.Module):
    def __init__(self, count, named):
        super().__init__()
        self.layers, self.named = nn.ModuleList(nn.Linear(2, 2) for _ in range(count)), named

    def stages(self):
        return list(self.layers)[: self.named]


NO_CUT = r"does not cut 4 .* into 2: give 1 rising numbers from 1 to 3, as \[2\]"
TWO_HERE = "must name two devices or more of this machine"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cut_into_groups(Stages(3, 1), 2), "Stages.*layers.1.weight"),
        (lambda: cut_into_groups(Stages(3, 3), 4), "3 stages, fewer than .* 4"),
        *(
            (partial(cut_into_groups, Stages(4, 4), 2, cut), NO_CUT)
            for cut in ([], [0], [4], [2, 1], ["a"], [1.5])
        ),
        (lambda: parse_devices(["cpu"]), TWO_HERE),
        (lambda: parse_devices(["cpu", "cuda:63"]), TWO_HERE),
        (lambda: parse_devices(["cpu", "toaster"]), "stage_devices"),
    ],
)
def test_what_cannot_be_cut_is_refused(call, said):
    with pytest.raises(UserError, match=said):
        call()


def test_a_cut_parts_alexnets_features_from_its_head():
    net = AlexNetBN(10, 128, 3)
    strategy = ModelParallel(stage_devices=["meta", "meta"], cut=[5])
    strategy._lightning_module = ImageClassifier(net, num_classes=10)
    strategy.model_to_device()
    assert strategy.lightning_module.device.type == "meta"  # its metrics count where the data lie
    features, head = net.__dict__["forward"].groups
    assert {id(p) for p in features.parameters()} == {id(p) for p in net.features.parameters()}
    assert {id(p) for p in head.parameters()} == {id(p) for p in net.classifier.parameters()}
