"""Groups as timm makes them, for nets of timm and our own.

Refused where an optimizer has its own.
"""

import copy
from functools import partial

import pytest
import timm.optim
import torch
from torch import nn

from lockstep.process.errors import UserError
from lockstep.training.parameter_groups import (
    GroupRules,
    freeze,
    head_names,
    layer_numbers,
    parameter_groups,
)
from models.airbench import Airbench
from models.alexnet import AlexNet, AlexNetBN
from models.small_cnn import SmallCNN
from models.timm import TimmModel
from optimizers.airbench import AirbenchMuon
from tasks.classifier import ImageClassifier

VIT = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2}


def timm_model(name):
    return TimmModel(3, 32, 3, name, pretrained=False, **(VIT if name.startswith("vit") else {}))


def trained(net):
    return [
        (name, parameter) for name, parameter in net.named_parameters() if parameter.requires_grad
    ]


def by_name(net, groups):
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    return {
        names[id(p)]: (round(g["lr_scale"], 12), g["weight_decay"])
        for g in groups
        for p in g["params"]
    }


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto", "tf_efficientnet_lite0"]
)
def test_layer_decay_is_that_of_timm(name):
    net = timm_model(name)
    own = parameter_groups(
        net, trained(net), GroupRules(layer_decay=0.75, decay_norms=False), lr=0.1
    )
    own = [{"weight_decay": 0.05, **group} for group in own]
    theirs = timm.optim.param_groups_layer_decay(
        net.backbone,
        0.05,
        layer_decay=0.75,
        no_weight_decay_list=getattr(net.backbone, "no_weight_decay", set)(),
    )
    expected = {f"backbone.{n}": value for n, value in by_name(net.backbone, theirs).items()}
    assert by_name(net, own) == expected
    assert all(group["lr"] == pytest.approx(0.1 * group["lr_scale"]) for group in own)
    assert len({scale for scale, _ in expected.values()}) > 3


def test_layers_are_numbered_by_stages_or_children():
    assert layer_numbers(SmallCNN(3, 8, 1)) == {
        f"{name}.{kind}": number
        for number, name in enumerate(["features.0", "features.2", "head.0", "head.3"])
        for kind in ("weight", "bias")
    }
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3))
    assert layer_numbers(plain) == {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": 1}
    assert head_names(plain) == {"2.weight", "2.bias"}
    assert max(layer_numbers(AlexNet(3, 63, 1)).values()) == 7


def test_the_head_learns_faster():
    net = SmallCNN(3, 8, 1)
    groups = parameter_groups(
        net, trained(net), GroupRules(layer_decay=0.5, head_lr_factor=10), lr=0.1
    )
    assert [group["lr"] for group in groups] == pytest.approx([0.0125, 0.025, 0.05, 1.0])
    assert {id(p) for p in groups[-1]["params"]} == {id(p) for p in net.head[3].parameters()}


def stepper(rules, optimizer=torch.optim.AdamW, **options):
    torch.manual_seed(0)
    module = ImageClassifier(
        SmallCNN(3, 8, 1), partial(optimizer, **options), num_classes=3, rules=rules
    )
    module._trainer = type("T", (), {"precision": "32-true"})()
    return module.configure_optimizers()


def test_without_rules_there_is_one_group():
    (group,) = stepper(None, lr=0.1).param_groups
    assert "lr_scale" not in group and len(group["params"]) == 8 and group["weight_decay"] == 0.01
    groups = stepper(GroupRules(decay_norms=False), lr=0.1, weight_decay=0.3).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (4, 0.3),
        (4, 0.0),
    ]
    assert (
        stepper(GroupRules(layer_decay=0.5)).param_groups[0]["lr"] == 1e-3 / 8
    )  # the optimizer's own default


# --- model.freeze ---


def frozen(net):
    return {name for name, parameter in net.named_parameters() if not parameter.requires_grad}


def test_freeze_patterns_name_parameters_and_modules():
    net = timm_model("resnet10t")
    freeze(net, ["conv1", "bn1", "backbone.layer1.*", "layer[23].0.bn1.weight"])
    first = ("backbone.conv1", "backbone.bn1", "backbone.layer1.")
    names = {name for name, _ in net.named_parameters() if name.startswith(first)}
    assert frozen(net) == names | {"backbone.layer2.0.bn1.weight", "backbone.layer3.0.bn1.weight"}
    for each in (net, copy.deepcopy(net)):
        before = {name: value.clone() for name, value in each.named_buffers()}
        each.train()(torch.randn(4, 3, 32, 32))
        moved = {
            name for name, value in each.named_buffers() if not torch.equal(value, before[name])
        }
        assert moved == {name for name in before if not name.startswith(first)} != set(before)


def test_dropout_in_a_frozen_part_does_nothing():
    net = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), nn.Dropout(0.5), nn.Linear(8, 2)
    )
    freeze(net, "0")
    net.train()
    assert [layer.training for layer in net] == [False, True, True]
    images = torch.randn(4, 8)
    assert torch.equal(net[0](images), net[0](images))


def test_the_backbone_is_all_but_the_head():
    for net, head in (
        (timm_model("resnet10t"), "backbone.fc"),
        (AlexNetBN(3, 127, 1), "classifier.6"),
    ):
        freeze(net, "backbone")
        names = {name for name, _ in net.named_parameters()}
        assert names - frozen(net) == {f"{head}.weight", f"{head}.bias"}


def test_what_a_net_itself_freezes_stays_frozen():
    net = Airbench(3, 9, 1, widths=(4, 4))
    before = frozen(net)
    freeze(net, "head")
    assert "whiten.weight" in before and frozen(net) == before | {"head.weight"}
    assert all(
        layer.train().training for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)
    )


def frozen_resnet(*stated):
    freeze(timm_model("resnet10t"), stated)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: frozen_resnet("conv1", "blocks.0"),
            "'blocks.0' matches no parameter: .* as conv1.* and fc.bias",
        ),
        (lambda: frozen_resnet("*"), "matches every parameter: leave at least the head"),
        (lambda: frozen_resnet("backbone", "fc"), "matches every parameter"),
        (
            lambda: freeze(nn.Linear(2, 2, bias=False), "x"),
            "'x' matches no parameter: .* as weight and weight",
        ),
        (
            lambda: GroupRules(layer_decay=0),
            "optimizer.layer_decay=0: give a number above 0 and up to 1",
        ),
        (lambda: GroupRules(layer_decay=1.1), "optimizer.layer_decay=1.1"),
        (lambda: GroupRules(layer_decay="x"), "optimizer.layer_decay=x"),
        (
            lambda: GroupRules(head_lr_factor=-1),
            "optimizer.head_lr_factor=-1: give a number above 0",
        ),
        (
            lambda: stepper(GroupRules(layer_decay=0.9), AirbenchMuon),
            "AirbenchMuon groups the parameters itself: leave optimizer.lay",
        ),
    ],
)
def test_wrong_rules_of_groups_are_refused(call, says):
    stepper(GroupRules(), AirbenchMuon, lr=0.1)
    with pytest.raises(UserError, match=says):
        call()


class WithOwnHead(ImageClassifier):
    """A task whose head has the name of a layer of its net: `head.0.weight`."""

    def __init__(self, **parts):
        super().__init__(SmallCNN(8, 8, 1), num_classes=3, **parts)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
        )


def test_a_head_beside_the_net_has_the_full_rate():
    rules = GroupRules(layer_decay=0.5, head_lr_factor=10.0)
    task = WithOwnHead(optimizer=partial(torch.optim.SGD, lr=1.0), rules=rules)
    task._trainer = type("T", (), {"precision": "32-true"})()
    rates = {
        id(parameter): group["lr"]
        for group in task.configure_optimizers().param_groups
        for parameter in group["params"]
    }
    rate_of = {name: rates[id(parameter)] for name, parameter in task.named_parameters()}
    assert rate_of["net.head.0.weight"] == 0.5, "the last but one layer of the net"
    assert rate_of["net.head.3.weight"] == 10.0
    assert rate_of["head.0.weight"] == 1.0 and rate_of["head.2.weight"] == 10.0
