"""What every model of src/models keeps to, and airbench."""

import pytest
import torch
from torchvision.models import alexnet

from lockstep.process.errors import UserError
from models import airbench
from models.airbench import Airbench
from models.alexnet import AlexNet, AlexNetBN
from models.small_cnn import SmallCNN
from models.timm import TimmModel

TINY_VIT = {
    "name": "vit_tiny_patch16_224",
    "pretrained": False,
    "patch_size": 4,
    "embed_dim": 48,
    "depth": 2,
}
CASES = {
    # name: (class, own arguments, image size, parameters with 3 channels, parameters with 1
    # channel)
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
    return model_class(
        num_classes=num_classes, image_size=image_size, channels=channels, **own
    ), image_size


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
    untouched = [
        key
        for key, p in net.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert untouched == []


def through(stages, images):
    for stage in stages:
        images = stage(images)
    return images


@pytest.mark.parametrize("name", CASES)
def test_stages_in_turn_train_as_the_whole_net_does(name):
    """With dropout on: the same draws in the same order, and the same gradients."""
    (whole, size), (split, _) = build(name), build(name)
    stages = split.stages()
    staged = [id(p) for stage in stages for p in (*stage.parameters(), *stage.buffers())]
    assert len(stages) >= 4 and sorted(staged) == sorted(
        id(p) for p in (*split.parameters(), *split.buffers())
    )
    images = torch.randn(2, 3, size, size)
    for outputs in (lambda: whole(images), lambda: through(stages, images)):
        torch.manual_seed(1)
        outputs().logsumexp(1).sum().backward()
    for (key, one), (_, other) in zip(
        whole.named_parameters(), split.named_parameters(), strict=True
    ):
        assert not one.requires_grad or torch.equal(one.grad, other.grad), key
    with torch.no_grad():
        assert torch.equal(through(split.eval().stages(), images), whole.eval()(images))


@pytest.mark.parametrize("name", CASES)
def test_shard_units_are_disjoint_parts_of_the_model(name):
    net, _ = build(name)
    units = [id(p) for unit in net.shard_units() for p in unit.parameters()]
    own = {id(p): p.numel() for p in net.parameters()}
    assert units and len(units) == len(set(units)) and set(units) <= set(own)
    assert sum(own[unit] for unit in units) > 0.6 * count(net)


@pytest.mark.parametrize(
    ("model_class", "smallest"), [(SmallCNN, 6), (AlexNet, 63), (AlexNetBN, 127), (Airbench, 9)]
)
def test_the_smallest_image_works_and_a_smaller_one_is_refused(model_class, smallest):
    net = model_class(num_classes=3, image_size=smallest, channels=1).eval()
    assert net(torch.zeros(1, 1, smallest, smallest)).shape == (1, 3)
    with pytest.raises(UserError, match=f"{smallest} px or more"):
        model_class(num_classes=10, image_size=smallest - 1, channels=3)


def test_alexnets_logits_equal_torchvisions_with_its_weights():
    reference, ours = (
        alexnet(num_classes=7).eval(),
        AlexNet(num_classes=7, image_size=224, channels=3).eval(),
    )
    ours.load_state_dict(reference.state_dict())
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(ours(images), reference(images))


def test_alexnet_bn_has_its_poolings_and_norms_in_place():
    kinds = [
        type(layer).__name__
        for layer in AlexNetBN(num_classes=2, image_size=224, channels=3).features
    ]
    pooled = ["Conv2d", "ReLU", "MaxPool2d", "BatchNorm2d"]
    assert kinds == pooled * 3 + ["Conv2d", "ReLU", "BatchNorm2d"] + pooled


# More of it.


def patches(images):
    return (
        images.unfold(2, 2, 1)
        .unfold(3, 2, 1)
        .permute(0, 2, 3, 1, 4, 5)
        .reshape(-1, images.shape[1] * 4)
    )


def correlated_images(count=64, channels=3):
    images = torch.randn(count, channels, 12, 12)
    return images.cumsum(2).cumsum(3) / 8 + 0.3 * images.mean(1, keepdim=True)


def test_whitening_is_repeatable_and_its_outputs_are_uncorrelated():
    torch.manual_seed(0)
    images = correlated_images()
    net, again = (Airbench(num_classes=10, image_size=12, channels=3) for _ in range(2))
    for each in (net, again):
        each.init_from_images(images)
    out = patches(images) @ net.whiten.weight.flatten(1).T
    half = out[:, :12]
    second_moment = half.T @ half / len(half)
    assert torch.allclose(second_moment, torch.diag(second_moment.diag()), atol=1e-2)
    assert second_moment.diag().min() > 0.5 and second_moment.diag().max() < 1.01
    assert torch.equal(out[:, 12:], -half) and torch.equal(net.whiten.weight, again.whiten.weight)
    rows = net.whiten.weight.flatten(1)[:12]  # an eigenvector's sign is fixed by its largest entry
    assert (rows.gather(1, rows.abs().argmax(1, keepdim=True)) > 0).all()
    assert not net.whiten.weight.requires_grad and net.whiten.bias.requires_grad


def test_whitening_of_large_images_goes_in_chunks(monkeypatch):
    torch.manual_seed(0)
    images = correlated_images()
    whole, chunked = (Airbench(num_classes=10, image_size=12, channels=3) for _ in range(2))
    whole.init_from_images(images)
    monkeypatch.setattr(airbench, "PIXELS_AT_ONCE", 7 * 12 * 12)
    chunked.init_from_images(images)
    torch.testing.assert_close(chunked.whiten.weight, whole.whiten.weight)
