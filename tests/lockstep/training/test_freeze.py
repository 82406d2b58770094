"""What training leaves as it is: by name, with its BatchNorm, refused where that would be nothing or everything."""

import copy

import pytest
import torch
from torch import nn

from lockstep.runs.errors import UserError
from lockstep.training.freeze import freeze
from models.airbench import Airbench
from models.alexnet import AlexNetBN
from models.small_cnn import SmallCNN
from models.timm import TimmModel


def resnet():
    torch.manual_seed(0)
    return TimmModel(3, 32, 3, "resnet10t", pretrained=False)


def frozen(net):
    return {name for name, parameter in net.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize(
    ("net", "head"),
    [
        (resnet, {"backbone.fc.weight", "backbone.fc.bias"}),
        (lambda: SmallCNN(3, 8, 1), {"head.3.weight", "head.3.bias"}),
        (lambda: AlexNetBN(3, 127, 1), {"classifier.6.weight", "classifier.6.bias"}),
        (lambda: Airbench(3, 9, 1, widths=(4, 4)), {"head.weight"}),
    ],
)
def test_the_backbone_is_all_but_the_head(net, head):
    net = net()
    freeze(net, "backbone")
    assert {name for name, _ in net.named_parameters()} - frozen(net) == head


def test_patterns_name_parameters_and_modules_as_timm_or_as_the_state_dict_does():
    net = resnet()
    freeze(net, ["conv1", "backbone.layer1.*", "layer[23].0.bn1.weight"])
    held = frozen(net)
    first = {name for name in held if name.startswith(("backbone.conv1.", "backbone.layer1."))}
    assert held - first == {"backbone.layer2.0.bn1.weight", "backbone.layer3.0.bn1.weight"}
    assert first == {n for n, _ in net.named_parameters() if n.startswith(("backbone.conv1.", "backbone.layer1."))}


def test_batch_norm_of_a_frozen_part_keeps_its_statistics_and_that_of_the_rest_learns():
    net = resnet()
    freeze(net, ["conv1", "bn1", "layer1"])
    other = copy.deepcopy(net)
    for each in (net, other):
        before = {name: value.clone() for name, value in each.named_buffers()}
        each.train()(torch.randn(4, 3, 32, 32))
        moved = {name for name, value in each.named_buffers() if not torch.equal(value, before[name])}
        still = {name for name in before if name.startswith(("backbone.conv1", "backbone.bn1", "backbone.layer1."))}
        assert still and moved == set(before) - still


def test_a_part_that_the_net_itself_does_not_train_stays_so_and_its_norms_train():
    net = Airbench(3, 9, 1, widths=(4, 4))
    before = frozen(net)
    freeze(net, "head")
    assert "whiten.weight" in before and frozen(net) == before | {"head.weight"}
    assert all(layer.train().training for layer in net.modules() if isinstance(layer, nn.BatchNorm2d))


@pytest.mark.parametrize(
    ("stated", "says"),
    [
        (["conv1", "blocks.0"], "'blocks.0' matches no parameter: take backbone, or .* as conv1.* and fc.bias"),
        ("*", "'\\*' matches every parameter: leave at least the head"),
        (["backbone", "fc"], "matches every parameter"),
    ],
)
def test_nothing_and_everything_are_refused(stated, says):
    with pytest.raises(UserError, match=says):
        freeze(resnet(), stated)
