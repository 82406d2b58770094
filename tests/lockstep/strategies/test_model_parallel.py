"""The net cut into stages trains as the whole one does, and its checkpoints are those of the whole one."""

import itertools

import pytest
import torch
from torch import nn

from classifier import ImageClassifier
from local_ranks import local_cluster
from lockstep.runs.errors import UserError
from lockstep.strategies.model_parallel import (
    ModelParallel,
    Pipeline,
    balanced_cut,
    check_cover,
    checked_cut,
    checked_devices,
)
from models.alexnet import AlexNet, AlexNetBN
from models.small_cnn import SmallCNN
from models.timm import TimmModel
from strategy_runs import difference, fit, one

TWO = ["cpu", "cpu"]


def split(**settings):
    own = {"stage_devices": TWO, **settings.pop("own", {})}
    return fit(local_cluster(0, 1, 0), "model_parallel", own=own, **settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"accumulate": 2}, {"clip": 0.5}, {"own": {"micro_batches": 5}}, {"own": {"stage_devices": ["cpu"] * 4}}],
    ids=str,
)
def test_equals_one_process_in_float64(settings):
    found = split(**settings)
    expected = one(clip=settings.get("clip"))
    assert difference([found], expected, settings.get("accumulate", 1)) < 1e-12


def test_what_the_module_makes_comes_to_the_first_device():
    """Lightning's own model_to_device would say so; a module that says "cpu" counts there what a GPU computes."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net.stages = lambda: list(net)
    strategy = ModelParallel(stage_devices=["meta", "meta"])
    strategy._lightning_module = ImageClassifier(net, num_classes=2)
    strategy.model_to_device()
    assert strategy.lightning_module.device.type == "meta"


def test_checkpoints_go_both_ways(tmp_path):
    split(save=tmp_path / "split.ckpt")
    one(save=tmp_path / "whole.ckpt")
    split_state, whole_state = (torch.load(tmp_path / name, weights_only=True) for name in ("split.ckpt", "whole.ckpt"))
    assert split_state["state_dict"].keys() == whole_state["state_dict"].keys()
    assert (
        one(test=True, resume=tmp_path / "split.ckpt")["test"]
        == split(test=True, resume=tmp_path / "whole.ckpt")["test"]
    )
    more = {"epochs": 2, "resume": tmp_path / "split.ckpt"}
    assert difference([split(**more)], one(**more)) < 1e-12


SHAPE = {"num_classes": 5, "channels": 3}
VIT = {"name": "vit_tiny_patch16_224", "pretrained": False, "embed_dim": 24, "depth": 2, "num_heads": 2}
NETS = {
    "alexnet": (64, lambda: AlexNet(image_size=64, dropout=0.0, **SHAPE)),
    "alexnet_bn": (128, lambda: AlexNetBN(image_size=128, dropout=0.0, **SHAPE)),
    "small_cnn": (16, lambda: SmallCNN(image_size=16, dropout=0.0, head_dropout=0.0, **SHAPE)),
    "vit": (16, lambda: TimmModel(image_size=16, patch_size=8, **VIT, **SHAPE)),
}


@pytest.mark.parametrize("name", NETS)
def test_the_split_net_gives_the_logits_of_the_whole_one(name):
    size, build = NETS[name]
    net = build()
    images = torch.randn(4, 3, size, size)
    net.eval()
    stages = net.stages()
    check_cover(net, stages)
    ends = balanced_cut([sum(p.numel() for p in stage.parameters()) for stage in stages], 2)
    groups = [nn.Sequential(*stages[: ends[0]]), nn.Sequential(*stages[ends[0] :])]
    with torch.no_grad():
        expected = net(images)
        pipeline = Pipeline(groups, [torch.device("cpu")] * 2, micro_batches=1)
        torch.testing.assert_close(pipeline(images), expected)
        pipeline.micro_batches = 3
        torch.testing.assert_close(pipeline(images), expected, rtol=1e-4, atol=1e-5)


def dearest(costs, ends):
    return max(sum(costs[a:b]) for a, b in zip([0, *ends], ends, strict=False))


def test_balanced_cut_equals_exhaustive_search():
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        costs = torch.randint(0, 20, (7,), generator=generator).tolist()
        for parts in (2, 3, 4):
            every = [[*ends, 7] for ends in itertools.combinations(range(1, 7), parts - 1)]
            found = balanced_cut(costs, parts)
            assert found in every
            assert dearest(costs, found) == min(dearest(costs, ends) for ends in every)


class HalfNamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def stages(self):
        return [self.first]


def test_what_cannot_be_cut_is_said():
    with pytest.raises(UserError, match="HalfNamed.*second.weight"):
        check_cover(HalfNamed(), HalfNamed().stages())
    with pytest.raises(UserError, match="3 stages.*4.*give 3 at most"):
        balanced_cut([1, 1, 1], 4)
    with pytest.raises(UserError, match=r"stage_devices=\[cpu,cpu\] works"):
        checked_devices(None if torch.cuda.device_count() < 2 else ["cpu"])
    with pytest.raises(UserError, match="two devices or more"):
        checked_devices(["cpu"])
    with pytest.raises(UserError, match="stage_devices"):
        checked_devices(["cpu", "toaster"])
    with pytest.raises(UserError, match="cuda:63"):
        checked_devices(["cpu", "cuda:63"])


def test_a_stated_cut_is_made_where_it_is_stated():
    """As the source has it: the features on one device, the head on the other."""
    net = AlexNetBN(10, 128, 3)
    strategy = ModelParallel(stage_devices=["meta", "meta"], cut=[5])
    strategy._lightning_module = ImageClassifier(net, num_classes=10)
    strategy.model_to_device()
    assert strategy.cut == [[0, 1, 2, 3, 4], [5, 6, 7]]
    features, head = net.__dict__["forward"].groups
    assert {id(p) for p in features.parameters()} == {id(p) for p in net.features.parameters()}
    assert {id(p) for p in head.parameters()} == {id(p) for p in net.classifier.parameters()}


@pytest.mark.parametrize("cut", [[], [0], [4], [2, 1], [1, 2], [-1], ["a"], [1.5], [True, 2]])
def test_a_cut_that_leaves_a_device_empty_is_refused(cut):
    with pytest.raises(UserError, match=r"does not cut 4 stages into 2: give 1 rising numbers from 1 to 3, as \[2\]"):
        checked_cut(cut, 4, 2)
