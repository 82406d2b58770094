"""Any model of timm by its name (uses `_pos_embed`, which has no public counterpart).

python src/train.py model=timm model.name=vit_small_patch16_224 model.pretrained=false
python src/train.py model=timm model.name=hf-hub:timm/resnet18.a1_in1k       (or local-dir:FOLDER)
"""

import difflib
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.process.errors import UserError

log = logging.getLogger(__name__)

# The parts that VisionTransformer.forward_head uses.
HEAD_PARTS = ("attn_pool", "fc_norm", "head_drop", "head", "head_dist")
# LightningModules, DDP and torch.compile put these before the names of weights.
PREFIXES = ("net.", "model.", "backbone.", "module.", "_orig_mod.")
IMAGE_SETTINGS = ("mean", "std", "crop_pct", "interpolation")


class TimmModel(nn.Module):
    """The model `name` of timm, built for the classes, image size and channels of the data.

    A new head on pretrained weights starts at zero, so that every class is equally likely.

    Args:
        name: of timm.list_models(), with a tag for its weights or without, hf-hub:OWNER/NAME or
            local-dir:FOLDER.
        pretrained: load timm's weights, which may download them.
        weights: a local .safetensors or .pth file in place of the download; its head is kept if it
            fits.
        timm_arguments: for timm.create_model: patch_size, embed_dim, depth, num_heads,
            drop_path_rate, …

    Raises:
        UserError: timm has no such model, it does not take an argument or the image size, or the
            weights do not fit or cannot be loaded.
    """

    def __init__(
        self,
        num_classes: int,
        image_size: int,
        channels: int,
        name: str | None = None,
        pretrained: bool = True,
        weights: str | None = None,
        **timm_arguments: Any,
    ) -> None:
        super().__init__()
        loads_timm_weights = pretrained and weights is None
        config = pretrained_config(name)
        if timm_arguments.get("in_chans", channels) != channels:
            raise UserError(
                f"model.in_chans={timm_arguments['in_chans']} is not the number of channels of the "
                f"images, {channels}: leave it out, as the net takes the channels of the data."
            )
        settings = {
            "num_classes": num_classes,
            "in_chans": channels,
            "pretrained": loads_timm_weights,
        }
        self.backbone = _create_backbone(str(name), image_size, channels, settings, timm_arguments)
        is_head_new = loads_timm_weights and config.get("num_classes") != num_classes
        if weights is not None:
            is_head_new = _load_weights(self.backbone, Path(weights), str(name), channels)
        if is_head_new:
            for head in _layers(self.backbone, "classifier"):
                for parameter in self.backbone.get_submodule(head).parameters():
                    nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    @classmethod
    def wanted_images(
        cls, name: str | None = None, pretrained: bool = True, weights: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return how the images of pretrained weights are prepared, as {"crop_pct": 0.9}.

        It is {} without pretrained weights.
        """
        if not pretrained and weights is None:
            return {}
        config = pretrained_config(name)
        settings = {key: config[key] for key in IMAGE_SETTINGS if key in config}
        for key, value in settings.items():
            if isinstance(value, tuple):
                settings[key] = list(value)
        return settings

    def shard_units(self) -> list[nn.Module]:
        """Return the members of the outermost sequences.

        They are a ViT's blocks, a ResNet's or ConvNeXt's stages.
        """
        units = []
        for child in self.backbone.children():
            if isinstance(child, nn.Sequential | nn.ModuleList):
                units += [unit for unit in child if _is_block(unit)]
        return units

    def head_names(self) -> list[str]:
        return [f"backbone.{name}" for name in _layers(self.backbone, "classifier")]

    def layer_numbers(self) -> dict[str, int]:
        """Return timm's layer of each parameter.

        In the few families that state none, each child is a layer.
        """
        from timm.models import group_parameters

        if hasattr(self.backbone, "group_matcher"):
            matcher = self.backbone.group_matcher(coarse=False)
            numbers = group_parameters(self.backbone, matcher, reverse=True)
        else:
            children = [name for name, _ in self.backbone.named_children()]
            numbers = {}
            for name, _ in self.backbone.named_parameters():
                child = name.partition(".")[0]
                numbers[name] = children.index(child) if child in children else 0
        return {f"backbone.{name}": number for name, number in numbers.items()}

    def undecayed_names(self) -> set[str]:
        """Return timm's names of parameters without weight decay."""
        if not hasattr(self.backbone, "no_weight_decay"):
            return set()
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}

    def adapted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict whose position embeddings timm has resampled to this image size.

        It is the same dict if there is nothing to do.
        """
        embedding = "backbone.pos_embed"
        patch = "backbone.patch_embed.proj.weight"
        shapes = _shapes(self)
        names = {embedding, patch}
        if not names <= shapes.keys() or not names <= state.keys():
            return state
        if state[embedding].shape == shapes[embedding] or state[patch].shape != shapes[patch]:
            return state
        backbone_state = {key.removeprefix("backbone."): value for key, value in state.items()}
        filtered_state = _filter_state(backbone_state, self.backbone)
        return {f"backbone.{key}": value for key, value in filtered_state.items()}

    def stages(self) -> list[nn.Module]:
        """Return patch embedding, each block, norm and head.

        Raises:
            UserError: the model is not a plain VisionTransformer.
        """
        from timm.models.vision_transformer import VisionTransformer

        vit: Any = self.backbone
        if type(vit).forward_features is not VisionTransformer.forward_features:
            raise UserError(
                f"timm's {type(vit).__name__} does not name its stages: trainer=model_parallel "
                "works with vit_* names, alexnet, alexnet_bn, small_cnn and airbench."
            )

        def embed(images: Tensor) -> Tensor:
            return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))

        later_names = ("blocks", "norm", *HEAD_PARTS)
        first_names = [name for name, _ in vit.named_children() if name not in later_names]
        first_names += [name for name, _ in vit.named_parameters(recurse=False)]
        head = _Stage(vit, HEAD_PARTS, vit.forward_head)
        return [_Stage(vit, first_names, embed), *vit.blocks, vit.norm, head]


def _is_block(unit: nn.Module) -> bool:
    """Return whether a module has children and parameters."""
    return any(True for _ in unit.children()) and any(True for _ in unit.parameters())


class _Stage(nn.Module):
    """Children and parameters of a VisionTransformer, which move to another device together.

    Args:
        compute: the forward of this part, a method of the whole net.
    """

    def __init__(
        self, vit: nn.Module, names: Iterable[str], compute: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, getattr(vit, name, None))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


# For small images, on a CPU
vit_tiny_32 = partial(TimmModel, name="vit_tiny_patch16_224", pretrained=False)


def pretrained_config(name: str | None) -> dict[str, Any]:
    """Return timm's config of the pretrained weights of a model name.

    Raises:
        UserError: there is no such model or tag, or its config cannot be read.
    """
    import timm
    from timm.models import resolve_model_input_args

    if name is None:
        raise UserError(
            "model=timm needs model.name, e.g. model.name=resnet18: any of timm.list_models()."
        )
    if ":" not in name and not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        advice = f"closest: {', '.join(close)}" if close else "see timm.list_models()"
        raise UserError(f"timm has no model named {name} (model.name); {advice}.")
    offline_reason = _go_offline_without_network() if name.startswith("hf") else ""
    try:
        return resolve_model_input_args(name)["pretrained_cfg"]
    except Exception as error:
        # The errors are timm's, the hub client's and its HTTP library's.
        reason = offline_reason or _one_line(error)
        raise UserError(f"model.name={name} cannot be used ({reason}).") from error


def _create_backbone(
    name: str, image_size: int, channels: int, settings: dict[str, Any], options: dict[str, Any]
) -> nn.Module:
    """Build the model and try it: with img_size if that works, otherwise at its default size.

    Args:
        settings: num_classes, in_chans and pretrained.
        options: further arguments of timm.create_model, from the user.

    Raises:
        UserError: it cannot be built or takes no such images, with the cause.
    """
    # Lockstep's handler shows the messages of the hub's client.
    logging.getLogger("huggingface_hub").handlers.clear()
    offline_reason = _go_offline_without_network() if settings["pretrained"] else ""
    arguments = {**settings, **options}
    failure: Exception | None = None
    for size in ({"img_size": image_size}, {}):
        try:
            backbone = _build_backbone(name, {**size, **arguments})
            _check_output(backbone, image_size, channels, settings["num_classes"])
        except Exception as error:
            # The errors are timm's, the hub client's, and assertions of any model.
            if size and isinstance(error, TypeError) and "img_size" in str(error):
                continue
            untrained = {**size, **arguments, "pretrained": False}
            if settings["pretrained"] and _can_build(name, image_size, channels, untrained):
                raise UserError(
                    f"the pretrained weights of {name} cannot be loaded "
                    f"({offline_reason or _one_line(error)}): give a local file with "
                    "model.weights=FILE, or train from scratch with model.pretrained=false."
                ) from error
            failure = failure or error
        else:
            return backbone.train()
    assert failure is not None
    raise _explain_failure(failure, name, image_size, channels, settings, options) from failure


def _build_backbone(name: str, arguments: dict[str, Any]) -> nn.Module:
    import timm

    backbone = timm.create_model(name, **arguments)
    for layer in _layers(backbone, "first_conv"):
        _use_patch_conv(backbone.get_submodule(layer))
    return backbone


def _check_output(backbone: nn.Module, image_size: int, channels: int, num_classes: int) -> None:
    """Raise an exception if the model does not turn an image into a value for each class."""
    parameter = next(backbone.parameters())
    if parameter.is_meta:
        return
    image = torch.zeros(1, channels, image_size, image_size, dtype=parameter.dtype)
    with torch.no_grad():
        output = backbone.eval()(image)
    if num_classes and isinstance(output, Tensor) and output.shape != (1, num_classes):
        shape = "×".join(map(str, output.shape[1:]))
        raise ValueError(f"the output is {shape} in place of {num_classes} classes")


def _can_build(name: str, image_size: int, channels: int, arguments: dict[str, Any]) -> bool:
    """Return whether the model can be built with other arguments: to find the cause of an error."""
    try:
        _check_output(
            _build_backbone(name, arguments), image_size, channels, arguments["num_classes"]
        )
    except Exception:
        return False
    return True


def _explain_failure(
    failure: Exception,
    name: str,
    image_size: int,
    channels: int,
    settings: dict[str, Any],
    options: dict[str, Any],
) -> UserError:
    """Return an error that names the cause: one of the user's arguments, or the image size."""
    reason = _one_line(failure)
    if isinstance(failure, TypeError) and "argument" in str(failure):
        return UserError(f"{name} does not take one of the model's arguments ({reason}).")
    arguments = {**settings, **options, "pretrained": False}
    for key, value in options.items():
        others = {other: arguments[other] for other in arguments if other != key}
        sizes: tuple[dict[str, Any], ...] = ({"img_size": image_size}, {})
        if any(_can_build(name, image_size, channels, {**size, **others}) for size in sizes):
            return UserError(f"{name} cannot be used with model.{key}={value!r} ({reason}).")
    return UserError(f"{name} cannot take data.image_size={image_size} ({reason}).")


class PatchConv(nn.Conv2d):
    """A convolution over patches that do not overlap, computed as one matrix product.

    cuDNN has no fast kernel for three channels: on an H200 its two took 18 of the 108 ms of a
    ViT-B/32's step.
    """

    def forward(self, images: Tensor) -> Tensor:
        batch, channels, height, width = images.shape
        rows, columns = self.kernel_size
        if height % rows or width % columns:
            return super().forward(images)
        patches = images.reshape(batch, channels, height // rows, rows, width // columns, columns)
        flat = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)
        return F.linear(flat, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)


def _use_patch_conv(layer: nn.Module) -> None:
    """Make a plain convolution of patches a PatchConv with the same parameters."""
    if type(layer) is not nn.Conv2d or layer.kernel_size != layer.stride or layer.groups != 1:
        return
    if layer.padding in (0, (0, 0), "valid") and layer.dilation == (1, 1):
        layer.__class__ = PatchConv


def _go_offline_without_network() -> str:
    """Make the hub's client use only its cache if the hub's host name is not found.

    It would retry for a minute.

    Returns:
        A sentence for errors; empty if the name is found, or a proxy looks for it.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        if not getproxies():
            socket.getaddrinfo(host, 443)
        return ""
    except OSError:
        constants.HF_HUB_OFFLINE = True
        return f"no network: {host} is not found, and its cache lacks them"


def _load_weights(backbone: nn.Module, path: Path, name: str, channels: int) -> bool:
    """Load a file as timm does: averaged weights first, with what differs adapted.

    Returns:
        Whether the head is new.

    Raises:
        UserError: there is no such file, it has no weights, or a weight is missing, unexpected or
            of another shape.
    """
    state = _read_weights(path)
    try:
        state = _filter_state(_strip_prefixes(state, backbone), backbone)
        _adapt_channels(state, backbone, channels)
        is_head_new = _replace_head(state, backbone)
        backbone.load_state_dict(state)
    except Exception as error:
        # The filters of timm index what they expect to find.
        raise UserError(f"model.weights={path} does not fit {name}: {_one_line(error)}.") from error
    return is_head_new


def _read_weights(path: Path) -> dict[str, Tensor]:
    from timm.models import load_state_dict

    if not path.is_file():
        raise UserError(
            f"model.weights={path} is not a file: give a local .safetensors or .pth file."
        )
    if rank_zero_only.rank == 0:
        # timm says which weights of the file it took.
        logging.getLogger("timm").setLevel(logging.INFO)
    try:
        return load_state_dict(str(path))
    except Exception as error:
        # A damaged file makes torch and safetensors raise nearly anything.
        raise UserError(
            f"model.weights={path} cannot be read as weights ({_one_line(error)}): give a "
            ".safetensors file or a .pth file of tensors by name. If you trust the file, this "
            "converts it: torch.save(torch.load(FILE, weights_only=False)['state_dict'], "
            "'weights.pth'), with .state_dict() where FILE holds a whole net."
        ) from error


def _strip_prefixes(state: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """Return the weights below a prefix of a LightningModule, DDP or torch.compile."""
    names = backbone.state_dict().keys()
    # A prefix may lie within another.
    for prefix in PREFIXES * 2:
        stripped = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        if stripped and not any(name.startswith(prefix) for name in names):
            state = stripped
    return state


def _adapt_channels(state: dict[str, Tensor], backbone: nn.Module, channels: int) -> None:
    """Adapt the weights of first convolutions to another number of input channels."""
    from timm.models import adapt_input_conv

    shapes = _shapes(backbone)
    for layer in _layers(backbone, "first_conv"):
        name = f"{layer}.weight"
        if name in state and name in shapes and state[name].shape[1] != shapes[name][1]:
            state[name] = adapt_input_conv(channels, state[name])


def _replace_head(state: dict[str, Tensor], backbone: nn.Module) -> bool:
    """Take the backbone's own head, and return True, unless the one of the file fits."""
    shapes = _shapes(backbone)
    heads = []
    for layer in _layers(backbone, "classifier"):
        heads += [f"{layer}.weight", f"{layer}.bias"]
    if all(key in state and state[key].shape == shapes[key] for key in heads if key in shapes):
        return False

    initial = backbone.state_dict()
    for key in heads:
        state.pop(key, None)
        if key in initial:
            state[key] = initial[key]
    return True


def _shapes(backbone: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in backbone.state_dict().items()}


def _filter_state(state: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """Return a state dict with this model's names and position embeddings.

    timm has a filter for most families.
    """
    adapt = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if adapt:
        state = adapt(state, backbone)
    return dict(state)


def _layers(backbone: nn.Module, kind: str) -> tuple[str, ...]:
    """Return the names of the layers that timm calls `classifier` or `first_conv`."""
    names = backbone.pretrained_cfg.get(kind) or ()
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
