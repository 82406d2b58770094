"""Every model keeps the same promises: shapes, gradients, precision, state dict, stages, shard units, size."""

import inspect
from pathlib import Path

import pytest
import torch
import yaml

from lockstep.runs.errors import UserError
from models.airbench import Airbench
from models.alexnet import AlexNet, AlexNetBN
from models.small_cnn import SmallCNN
from models.timm import TimmModel, vit_tiny_32

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"
TINY_VIT = {"name": "vit_tiny_patch16_224", "pretrained": False, "patch_size": 4, "embed_dim": 48, "depth": 2}
CASES = {
    # name: (class, own arguments, image size, parameters with 3 channels, parameters with 1 channel)
    "small_cnn": (SmallCNN, {}, 32, 1_626_442, 1_625_866),
    "small_cnn_8px": (SmallCNN, {}, 8, 53_578, 53_002),
    "alexnet": (AlexNet, {}, 64, 57_044_810, 57_029_322),
    "alexnet_bn": (AlexNetBN, {}, 128, 57_047_114, 57_031_626),
    "airbench": (Airbench, {"widths": [16, 32, 48], "depth": 2}, 28, 55_320, 52_744),
    "vit": (TimmModel, {**TINY_VIT, "num_heads": 3}, 32, 62_650, 61_114),
}


def build(name, channels=3, num_classes=10):
    model_class, own, image_size, *_ = CASES[name]
    torch.manual_seed(0)
    return model_class(num_classes=num_classes, image_size=image_size, channels=channels, **own), image_size


def count(net):
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("channels", [1, 3])
def test_contract(name, channels):
    net, size = build(name, channels)
    assert count(net) == CASES[name][3 if channels == 3 else 4]
    images = torch.randn(2, channels, size, size)
    logits = net(images)
    assert logits.shape == (2, 10) and logits.dtype == torch.float32
    logits.logsumexp(1).sum().backward()
    untouched = [key for key, p in net.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert untouched == []


@pytest.mark.parametrize("name", CASES)
def test_stages_in_turn_equal_forward(name):
    net, size = build(name)
    net.eval()
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        out = images
        for stage in net.stages():
            out = stage(out)
        assert torch.equal(out, net(images))
    assert len(net.stages()) >= 4


@pytest.mark.parametrize("name", CASES)
def test_stages_hold_each_parameter_and_buffer_once(name):
    net, _ = build(name)
    staged = [id(p) for stage in net.stages() for p in (*stage.parameters(), *stage.buffers())]
    assert sorted(staged) == sorted(id(p) for p in (*net.parameters(), *net.buffers()))


@pytest.mark.parametrize("name", CASES)
def test_stages_train_like_the_whole(name):
    """With dropout on: the same draws in the same order, and the same gradients."""
    whole, size = build(name)
    split, _ = build(name)
    images = torch.randn(2, 3, size, size)
    torch.manual_seed(1)
    whole(images).logsumexp(1).sum().backward()
    torch.manual_seed(1)
    out = images
    for stage in split.stages():
        out = stage(out)
    out.logsumexp(1).sum().backward()
    for (key, one), (_, other) in zip(whole.named_parameters(), split.named_parameters(), strict=True):
        assert not one.requires_grad or torch.equal(one.grad, other.grad), key


@pytest.mark.parametrize("name", CASES)
def test_shard_units_are_disjoint_parts_of_the_model(name):
    net, _ = build(name)
    units = [id(p) for unit in net.shard_units() for p in unit.parameters()]
    own = {id(p): p.numel() for p in net.parameters()}
    assert units and len(units) == len(set(units)) and set(units) <= set(own)
    assert sum(own[unit] for unit in units) > 0.6 * count(net)


@pytest.mark.parametrize("name", CASES)
def test_float64_and_state_dict(name, tmp_path):
    net, size = build(name)
    torch.save(net.state_dict(), tmp_path / "net.pt")
    other, _ = build(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(torch.load(tmp_path / "net.pt", weights_only=True))
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        single = net.eval()(images)
        assert torch.equal(other.eval()(images), single)
        double = net.double()(images.double())
    assert double.dtype == torch.float64
    assert (double - single).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["small_cnn", "alexnet", "alexnet_bn", "airbench", "timm", "vit_tiny_32"])
def test_yaml_states_what_the_signature_does(name):
    """A default lives in the signature; the yaml repeats it so that it can be seen and overridden."""
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    file, _, class_name = config.pop("_target_").rpartition(".")
    model_class = {m.__name__: m for m in (SmallCNN, AlexNet, AlexNetBN, Airbench, TimmModel, vit_tiny_32)}[class_name]
    assert model_class.__module__ == file
    defaults = {k: p.default for k, p in inspect.signature(model_class).parameters.items()}
    for key, value in config.items():
        if key in defaults:
            expected = list(defaults[key]) if isinstance(defaults[key], tuple) else defaults[key]
            assert value == expected, key
        else:
            assert value is None, key


@pytest.mark.parametrize(
    ("model_class", "image_size", "says"),
    [
        (SmallCNN, 5, "6 px or more"),
        (AlexNet, 62, "63 px or more"),
        (AlexNetBN, 126, "127 px or more"),
        (Airbench, 8, "9 px or more"),
    ],
)
def test_image_size_too_small(model_class, image_size, says):
    with pytest.raises(UserError, match=says):
        model_class(num_classes=10, image_size=image_size, channels=3)


@pytest.mark.parametrize(("model_class", "image_size"), [(SmallCNN, 6), (AlexNet, 63), (AlexNetBN, 127), (Airbench, 9)])
def test_smallest_image_size_works(model_class, image_size):
    net = model_class(num_classes=3, image_size=image_size, channels=1).eval()
    assert net(torch.zeros(1, 1, image_size, image_size)).shape == (1, 3)
