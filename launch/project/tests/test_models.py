"""Every model in configs/model/ gives one number a class, and every parameter of it learns."""

import pytest
import torch

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.training.build_module import build_module

SIZES = {"vit": 224, "alexnet_bn": 128}  # what a model wants; else 64
MORE = {"timm": ["model.name=resnet18"]}
MODELS = sorted(path.stem for path in (CONFIGS / "model").glob("*.yaml"))


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_gradients(name):
    config = plain(compose("train", [f"model={name}", *MORE.get(name, ())]))
    size = SIZES.get(name, 64)
    facts = {"num_classes": 7, "image_size": size, "channels": 3}
    net = build_module(config, facts, trainable=False).net
    logits = net(torch.randn(2, 3, size, size))
    assert logits.shape == (2, 7)
    logits.logsumexp(1).sum().backward()
    assert [key for key, p in net.named_parameters() if p.requires_grad and p.grad is None] == []
