import math

import pytest
import torch
from safetensors.torch import save_file

from lockstep.runs.errors import UserError
from models.timm import TimmModel

TINY = {
    "name": "vit_tiny_patch16_224",
    "pretrained": False,
    "patch_size": 4,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 3,
}


def tiny(num_classes=10, image_size=16, channels=3, **more):
    return TimmModel(num_classes=num_classes, image_size=image_size, channels=channels, **{**TINY, **more})


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whatever reaches for the network fails at once, names among it."""
    import socket

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # and what it becomes in a test is taken back

    def refuse(*args, **kwargs):
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_parameters_of_vit_b_32():
    net = TimmModel(num_classes=10, image_size=224, channels=3, name="vit_base_patch32_224", pretrained=False)
    assert sum(parameter.numel() for parameter in net.parameters()) == 87_462_922
    assert len(net.shard_units()) == 12 and len(net.stages()) == 15


def test_pretrained_weights_say_how_they_want_their_images():
    wanted = TimmModel.wanted_images(name="vit_base_patch32_224", pretrained=True)
    assert wanted == {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9, "interpolation": "bicubic"}
    assert TimmModel.wanted_images(name="resnet18", pretrained=False, weights="x.pth")["crop_pct"] == 0.95
    assert TimmModel.wanted_images(name="resnet18", pretrained=False) == {}
    with pytest.raises(UserError, match="timm has no model named resnet19"):
        TimmModel.wanted_images(name="resnet19")


def test_weights_of_another_image_size_are_resampled_as_timm_does():
    from timm.layers import resample_abs_pos_embed

    small, large = tiny(image_size=16), tiny(image_size=32)
    own, found = small.state_dict(), large.adapted(small.state_dict())
    assert found.keys() == own.keys() and small.adapted(own) is own
    other = tiny(patch_size=8).state_dict()
    assert large.adapted(other) is other, "another net, for the check to name"
    large.load_state_dict(found)
    wanted = resample_abs_pos_embed(own["backbone.pos_embed"], new_size=[8, 8], num_prefix_tokens=1)
    assert torch.equal(found["backbone.pos_embed"], wanted) and wanted.shape[1] == 65
    same = [name for name in own if name != "backbone.pos_embed"]
    assert all(torch.equal(found[name], own[name]) for name in same)


def test_unknown_name_is_answered_with_the_closest():
    with pytest.raises(UserError, match="vit_bass_patch32_224 .*vit_base_patch32_224"):
        tiny(name="vit_bass_patch32_224")


@pytest.mark.parametrize(("size", "works"), [(18, "16 or 20 works"), (2, "4 works")])
def test_image_size_that_patches_do_not_divide(size, works):
    with pytest.raises(UserError, match=works):
        tiny(image_size=size)


def test_unknown_argument():
    with pytest.raises(UserError, match="does not take.*windows"):
        tiny(windows=3)


def test_hub_unreachable_names_both_ways_out(monkeypatch, capfd):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [])  # its name is found, as behind a firewall
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the hub's client waits longer after each attempt
    with pytest.raises(UserError, match="model.weights=FILE.*model.pretrained=false"):
        TimmModel(num_classes=10, image_size=224, channels=3, name="vit_tiny_patch16_224")
    said = capfd.readouterr().err.splitlines()  # each line once, as ours
    assert said and all(line.startswith("warning: ") for line in said)


def test_without_a_network_nothing_is_tried_again(monkeypatch, tmp_path, capfd):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    with pytest.raises(UserError, match=r"\(no network: huggingface.co is not found .*model.weights=FILE"):
        TimmModel(num_classes=10, image_size=224, channels=3, name="vit_tiny_patch16_224")
    assert capfd.readouterr().err == ""


def test_without_a_network_the_hubs_cache_is_used(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    there = tmp_path / "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("a" * 40)
    (there / "snapshots" / ("a" * 40)).mkdir(parents=True)
    trained = tiny(num_classes=1000)
    save_file(trained.backbone.state_dict(), there / "snapshots" / ("a" * 40) / "model.safetensors")
    net = tiny(num_classes=10, pretrained=True)
    assert torch.equal(net.backbone.blocks[0].mlp.fc1.weight, trained.backbone.blocks[0].mlp.fc1.weight)
    assert net.backbone.head.weight.shape == (10, 48) and not net.backbone.head.weight.any()


def test_a_convolutional_model_without_stages():
    net = TimmModel(num_classes=10, image_size=32, channels=1, name="resnet10t", pretrained=False)
    assert net(torch.zeros(2, 1, 32, 32)).shape == (2, 10)
    assert net.training and len(net.shard_units()) == 4
    with pytest.raises(UserError, match="does not name its stages"):
        net.stages()


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "wrapped"])
def test_weights_from_a_file(tmp_path, suffix):
    torch.manual_seed(0)
    source = tiny(num_classes=10).eval()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        save_file(source.backbone.state_dict(), path)
    else:
        state = source.backbone.state_dict()
        torch.save({"state_dict": state, "epoch": 3} if suffix == "wrapped" else state, path)
    torch.manual_seed(1)
    images = torch.randn(2, 3, 16, 16)
    loaded = tiny(num_classes=10, weights=str(path)).eval()
    assert torch.equal(loaded(images), source(images))


def test_a_new_head_on_trained_weights_starts_at_the_loss_of_chance(tmp_path):
    save_file(tiny(num_classes=10).backbone.state_dict(), tmp_path / "weights.safetensors")
    images = 30 * torch.randn(8, 3, 32, 32)
    for num_classes, is_chance in ((10, False), (7, True)):
        net = tiny(num_classes=num_classes, image_size=32, weights=str(tmp_path / "weights.safetensors")).eval()
        loss = torch.nn.functional.cross_entropy(net(images), torch.arange(8) % num_classes)
        assert (loss.item() == pytest.approx(math.log(num_classes), abs=1e-6)) == is_chance


def test_weights_with_another_head_size_and_channels_are_adapted(tmp_path):
    torch.manual_seed(0)
    source = tiny(num_classes=10)
    save_file(source.backbone.state_dict(), tmp_path / "weights.safetensors")
    torch.manual_seed(1)
    loaded = tiny(num_classes=4, image_size=32, channels=1, weights=str(tmp_path / "weights.safetensors"))
    assert torch.equal(loaded.backbone.blocks[1].mlp.fc1.weight, source.backbone.blocks[1].mlp.fc1.weight)
    summed = source.backbone.patch_embed.proj.weight.sum(1, keepdim=True)
    assert torch.allclose(loaded.backbone.patch_embed.proj.weight, summed, atol=1e-6)
    assert loaded.backbone.pos_embed.shape == (1, 65, 48) and loaded.backbone.head.weight.shape == (4, 48)


class Trap:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no file"),
        ({"trap": Trap()}, "cannot be read as weights"),
        (["a"], "holds no state dict"),
        ({"other.weight": torch.zeros(3)}, "does not fit .*it lacks"),
    ],
)
def test_files_that_are_no_weights(tmp_path, content, says, capsys):
    path = tmp_path / "weights.pth"
    if content is not None:
        torch.save(content, path)
    with pytest.raises(UserError, match=says):
        tiny(weights=str(path))
    assert "executed" not in capsys.readouterr().out


def test_weights_of_another_architecture(tmp_path):
    save_file(tiny(embed_dim=24).backbone.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match=r"does not fit vit_tiny_patch16_224: cls_token is \(1, 1, 24\)"):
        tiny(weights=str(tmp_path / "weights.safetensors"))


def test_weights_with_more_blocks(tmp_path):
    save_file(tiny(depth=3).backbone.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(UserError, match="12 weights too many, blocks.2"):
        tiny(weights=str(tmp_path / "weights.safetensors"))
