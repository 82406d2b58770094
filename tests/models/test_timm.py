import math
from argparse import Namespace

import pytest
import torch
from safetensors.torch import save_file

from lockstep.process.errors import UserError
from models.patch_conv import PatchConv
from models.timm import TimmModel

SIZES = {"patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 3}
TINY = {"name": "vit_tiny_patch16_224", "pretrained": False, **SIZES}


def tiny(num_classes=10, image_size=16, channels=3, **more):
    return TimmModel(
        num_classes=num_classes, image_size=image_size, channels=channels, **{**TINY, **more}
    )


def plain(name, image_size=32, channels=3, **more):
    return TimmModel(
        num_classes=10,
        image_size=image_size,
        channels=channels,
        name=name,
        pretrained=False,
        **more,
    )


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whatever reaches for the network fails at once, names among it."""
    import socket

    from huggingface_hub import constants

    monkeypatch.setattr(
        constants, "HF_HUB_OFFLINE", False
    )  # and what it becomes in a test is taken back

    def refuse(*args, **kwargs):
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_pretrained_weights_say_how_they_want_their_images():
    wanted = TimmModel.image_settings(name="vit_base_patch32_224", pretrained=True)
    assert wanted == {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
    }
    assert (
        TimmModel.image_settings(name="resnet18", pretrained=False, weights="x.pth")["crop_pct"]
        == 0.95
    )
    assert TimmModel.image_settings(name="resnet18", pretrained=False) == {}


def test_weights_of_another_image_size_are_resampled_as_timm_does():
    from timm.layers import resample_abs_pos_embed

    small, large = tiny(image_size=16), tiny(image_size=32)
    own, found = small.state_dict(), large.adapt_to_image_size(small.state_dict())
    assert found.keys() == own.keys() and small.adapt_to_image_size(own) is own
    other = tiny(patch_size=8).state_dict()
    assert large.adapt_to_image_size(other) is other, "another net, for the check to name"
    large.load_state_dict(found)
    wanted = resample_abs_pos_embed(own["backbone.pos_embed"], new_size=[8, 8], num_prefix_tokens=1)
    assert torch.equal(found["backbone.pos_embed"], wanted) and wanted.shape[1] == 65
    assert all(torch.equal(found[name], own[name]) for name in own if name != "backbone.pos_embed")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda: tiny(name="vit_bass_patch32_224"),
            "no model named vit_bass_patch32_224 .*vit_base_patch32_224",
        ),
        (lambda: TimmModel.image_settings(name="resnet19"), "timm has no model named resnet19"),
        (lambda: tiny(image_size=2), "vit_tiny_patch16_224 cannot take data.image_size=2 "),
        (lambda: tiny(windows=3), "does not take.*windows"),
        (
            lambda: plain("resnet10t", in_chans=4),
            "model.in_chans=4 is not the number of channels .* 3:",
        ),
        (lambda: plain("resnet10t", global_pool=""), "cannot be used with model.global_pool=''"),
        (lambda: tiny(global_pool=""), "cannot be used with model.global_pool='' .*output is"),
        (
            lambda: TimmModel.image_settings(name="resnet18.nope"),
            "model.name=resnet18.nope cannot be used .*nope",
        ),
        (
            lambda: TimmModel(10, 32, 3, "resnet18.nope"),
            "model.name=resnet18.nope cannot be used .*nope",
        ),
        (
            lambda: TimmModel(10, 16, 3, "local-dir:/nowhere"),
            "local-dir:/nowhere cannot be used .*config.json",
        ),
        (
            lambda: TimmModel(10, 16, 3, "hf-hub:a/b"),
            "cannot be used .no network: huggingface.co is not found",
        ),
        (lambda: plain("resnet10t").stages(), "does not name its stages"),
    ],
)
def test_what_timm_refuses_is_one_sentence(call, says):
    with pytest.raises(UserError, match=says):
        call()


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("pvt_v2_b0", 96, {}),
        ("pit_ti_224", 72, {}),
        ("mvitv2_tiny", 98, {}),
        ("swin_tiny_patch4_window7_224", 98, {}),
        ("vit_tiny_patch16_224", 100, {"dynamic_img_pad": True, "dynamic_img_size": True}),
    ],
)
def test_an_image_size_that_timm_takes_is_taken(name, size, arguments):
    assert plain(name, size, **arguments).eval()(torch.zeros(1, 3, size, size)).shape == (1, 10)


def test_a_vit_and_a_convolutional_model_name_their_parts():
    vit, convolutional = plain("vit_base_patch32_224", 224), plain("resnet10t", channels=1)
    assert sum(parameter.numel() for parameter in vit.parameters()) == 87_462_922
    assert (len(vit.shard_units()), len(vit.stages()), len(convolutional.shard_units())) == (
        12,
        15,
        4,
    )
    assert convolutional.training and convolutional(torch.zeros(2, 1, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("name", ["pit_ti_224", "poolformerv2_s12", "resnet18"])
def test_layers_rise_from_the_images_to_the_head(name):
    ordered = list(plain(name, 64).layer_numbers().values())
    assert ordered[0] == 0 and ordered[-1] == max(ordered) >= 2


def test_a_folder_that_timm_exported(tmp_path):
    from timm.models import save_for_hf

    source = tiny(num_classes=10).eval()
    images = {"mean": (0.1, 0.2, 0.3), "input_size": (3, 16, 16), "crop_pct": 0.8}
    save_for_hf(source.backbone, str(tmp_path), safe_serialization=True, data_config=images)
    name = f"local-dir:{tmp_path}"
    wanted = TimmModel.image_settings(name=name)
    assert (wanted["mean"], wanted["crop_pct"]) == ([0.1, 0.2, 0.3], 0.8)
    loaded, other = (
        TimmModel(classes, image_size=16, channels=3, name=name).eval() for classes in (10, 4)
    )
    pixels = torch.randn(2, 3, 16, 16)
    assert torch.equal(loaded(pixels), source(pixels))
    assert not other(pixels).any(), "a new head starts at zero"


def test_hub_unreachable_names_both_ways_out(monkeypatch, capfd):
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *_: []
    )  # its name is found, as behind a firewall
    monkeypatch.setattr(
        "time.sleep", lambda seconds: None
    )  # the hub's client waits longer after each attempt
    with pytest.raises(UserError, match="model.weights=FILE.*model.pretrained=false"):
        TimmModel(num_classes=10, image_size=224, channels=3, name="vit_tiny_patch16_224")
    said = capfd.readouterr().err.splitlines()  # each line once, as ours
    assert said and all(line.startswith("warning: ") for line in said)


def test_without_a_network_the_hubs_cache_is_used(monkeypatch, tmp_path, capfd):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    with pytest.raises(
        UserError, match=r"\(no network: huggingface.co is not found, .*model.weights=FILE"
    ):
        TimmModel(num_classes=10, image_size=224, channels=3, name="vit_tiny_patch16_224")
    assert capfd.readouterr().err == ""
    there = tmp_path / "models--timm--vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    (there / "refs").mkdir(parents=True)
    (there / "refs" / "main").write_text("a" * 40)
    (there / "snapshots" / ("a" * 40)).mkdir(parents=True)
    trained = tiny(num_classes=1000)
    save_file(trained.backbone.state_dict(), there / "snapshots" / ("a" * 40) / "model.safetensors")
    net = tiny(num_classes=10, pretrained=True)
    assert torch.equal(
        net.backbone.blocks[0].mlp.fc1.weight, trained.backbone.blocks[0].mlp.fc1.weight
    )
    assert net.backbone.head.weight.shape == (10, 48) and not net.backbone.head.weight.any()


def other(state):
    return {key: value + 1 for key, value in state.items()}


def prefixed(state, prefix):
    return {f"{prefix}{key}": value for key, value in state.items()}


@pytest.mark.parametrize(
    ("wrap", "taken"),
    [
        (None, "from checkpoint"),  # safetensors
        (lambda state: state, "from checkpoint"),
        (
            lambda state: {
                "state_dict": other(state),
                "state_dict_ema": state,
                "args": Namespace(),
            },
            "state_dict_ema",
        ),
        (lambda state: {"model": other(state), "model_ema": state}, "model_ema"),
        (lambda state: {"model": state, "epoch": 3}, "Loaded model"),
        (lambda state: prefixed(state, "module."), "from checkpoint"),
        (lambda state: prefixed(state, "_orig_mod.module."), "from checkpoint"),
        (
            lambda state: {
                "state_dict": {**prefixed(state, "net.backbone."), "loss.w": torch.ones(2)}
            },
            "state_dict",
        ),
        (lambda state: {"state_dict": prefixed(state, "model.")}, "state_dict"),
        (lambda state: {"state_dict": prefixed(state, "model._orig_mod.")}, "state_dict"),
    ],
)
def test_weights_of_other_trainings_load_as_timm_loads_them(tmp_path, wrap, taken, caplog):
    source, path = tiny().eval(), tmp_path / ("last.pth.tar" if wrap else "last.safetensors")
    state = source.backbone.state_dict()
    save_file(state, path) if wrap is None else torch.save(wrap(state), path)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(tiny(weights=str(path)).eval()(images), source(images))
    assert any(taken in line and str(path) in line for line in caplog.messages)


def test_weights_of_another_size_are_adapted(
    tmp_path,
):
    torch.manual_seed(0)
    source = tiny(num_classes=10)
    save_file(source.backbone.state_dict(), tmp_path / "weights.safetensors")
    torch.manual_seed(1)
    for num_classes, is_chance in ((10, False), (7, True)):
        weights = str(tmp_path / "weights.safetensors")
        loaded = tiny(num_classes=num_classes, image_size=32, channels=1, weights=weights).eval()
        loss = torch.nn.functional.cross_entropy(
            loaded(30 * torch.randn(8, 1, 32, 32)), torch.arange(8) % num_classes
        )
        assert (loss.item() == pytest.approx(math.log(num_classes), abs=1e-6)) == is_chance
    assert torch.equal(
        loaded.backbone.blocks[1].mlp.fc1.weight, source.backbone.blocks[1].mlp.fc1.weight
    )
    summed = source.backbone.patch_embed.proj.weight.sum(1, keepdim=True)
    assert torch.allclose(loaded.backbone.patch_embed.proj.weight, summed, atol=1e-6)
    assert loaded.backbone.pos_embed.shape == (1, 65, 48) and loaded.backbone.head.weight.shape == (
        7,
        48,
    )


class Trap:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda: {"trap": Trap()}, "cannot be read as weights.*this converts it: torch.save"),
        (lambda: ["a"], "cannot be read as weights"),
        (lambda: {"other.weight": torch.zeros(3)}, "does not fit .*Missing key"),
        (
            lambda: tiny(embed_dim=24).backbone.state_dict(),
            r"does not fit vit_tiny.* size mismatch .*\[1, 1, 24\]",
        ),
        (lambda: tiny(depth=3).backbone.state_dict(), 'Unexpected key.* "blocks.2'),
    ],
)
def test_files_that_are_no_weights_of_this_net_are_refused(tmp_path, content, says, capsys):
    path = tmp_path / "weights.pth"
    with pytest.raises(UserError, match="is not a file"):
        tiny(weights=str(path))
    torch.save(content(), path)
    with pytest.raises(UserError, match=says):
        tiny(weights=str(path))
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("channels", "size"), [(3, (16, 24)), (1, (8, 8)), (3, (18, 16))]
)  # 18: its last rows are cut
def test_patches_by_a_matrix_product_are_those_of_the_convolution(channels, size):
    layer = (
        plain("vit_tiny_patch16_224", channels=channels, patch_size=4)
        .double()
        .backbone.patch_embed.proj
    )
    images = torch.randn(2, channels, *size, dtype=torch.float64, requires_grad=True)
    found, expected = (
        layer(images),
        torch.nn.functional.conv2d(images, layer.weight, layer.bias, stride=4),
    )
    assert type(layer) is PatchConv and found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    wanted = (images, layer.weight, layer.bias)
    mine, theirs = (torch.autograd.grad((out**2).sum(), wanted) for out in (found, expected))
    torch.testing.assert_close(mine, theirs)
    assert not any(isinstance(module, PatchConv) for module in plain("resnet18").modules())


def test_new_features_on_pretrained_weights_start_at_random(tmp_path):
    """Zeros would never learn behind the ReLU of a projection, as that of task=simclr."""
    weights = tmp_path / "weights.safetensors"
    save_file(tiny(num_classes=10).backbone.state_dict(), weights)
    pixels = torch.randn(4, 3, 16, 16)
    classes = tiny(num_classes=4, weights=str(weights))
    features = tiny(num_classes=4, weights=str(weights), outputs_are_classes=False)
    assert not classes(pixels).any()
    features(pixels).relu().sum().backward()
    assert features.backbone.blocks[0].attn.qkv.weight.grad.any()


@pytest.mark.parametrize(
    ("name", "size", "options", "said"),
    [
        ("vit_tiny_patch16_224", 250, {}, "the last 10 of 250 rows and columns"),
        ("vit_tiny_patch16_224", 240, {}, ""),
        ("vit_tiny_patch16_224", 250, {"dynamic_img_pad": True, "dynamic_img_size": True}, ""),
        ("resnet10t", 250, {}, ""),
    ],
)
def test_a_border_that_patches_do_not_cover_is_named(name, size, options, said, caplog):
    plain(name, size, **options)
    warned = [record.getMessage() for record in caplog.records]
    assert [message for message in warned if "does not see" in message] == [
        message for message in warned if said
    ]
    if said:
        assert said in warned[0] and "data.image_size=240 or 256" in warned[0]


@pytest.mark.parametrize(
    ("names", "is_warned"),
    [
        (["tench", "cock", "hen"], True),
        (["n01440764", "n01443537", "n01484850"], False),
        (["0", "1", "2"], False),
    ],
)
def test_a_kept_head_has_the_classes_in_its_own_order(names, is_warned, tmp_path, caplog):
    weights = tmp_path / "weights.safetensors"
    save_file(tiny(num_classes=3).backbone.state_dict(), weights)
    tiny(num_classes=3, weights=str(weights), class_names=names)
    assert ("classes in their order (tench, cock, hen, …)" in caplog.text) == is_warned
    assert ("brings its own 3 outputs" in caplog.text) == is_warned
    caplog.clear()
    tiny(num_classes=3, class_names=["tench", "cock", "hen"])
    assert "brings its own" not in caplog.text, "no weights, no order"
