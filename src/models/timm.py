"""Any model of timm by its name (uses `_pos_embed` of its VisionTransformer, which nothing public stands for).

python src/train.py model=timm model.name=vit_small_patch16_224 model.pretrained=false
"""

import difflib
import logging
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from lockstep.runs.errors import UserError
from lockstep.storage.load import load_plain

HEAD_NAMES = ("attn_pool", "fc_norm", "head_drop", "head", "head_dist")  # what VisionTransformer.forward_head uses


class TimmModel(nn.Module):
    """timm's model `name` built for the data's classes, image size and channels.

    weights: a local safetensors or pth file, which stands in for the download; its head is kept where it fits.
    A new head on trained weights starts at zero: every class is equally likely, and the loss that of chance.
    Further arguments go to timm.create_model: patch_size, embed_dim, depth, num_heads, drop_path_rate, …
    Nothing is fetched unless `pretrained` is true and `weights` is not given.

    Raises:
        UserError: a name that timm lacks, an argument or image size that the model cannot take, weights that do not fit
            or cannot be had.
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
        _check_name(name)
        self.name, self.timm_arguments = name, timm_arguments
        settings = {"num_classes": num_classes, "in_chans": channels, **timm_arguments}
        from_hub = pretrained and weights is None
        self.backbone = _create(name, image_size, {**settings, "pretrained": from_hub})
        is_head_new = from_hub and self.backbone.pretrained_cfg.get("num_classes") != num_classes
        if weights is not None:
            is_head_new = _load(self.backbone, Path(weights), name, channels)
        if is_head_new:
            _zero(self.backbone, _names(self.backbone.pretrained_cfg.get("classifier")))
        _check_image_size(self.backbone, name, image_size, channels)

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    @classmethod
    def wanted_images(
        cls, name: str | None = None, pretrained: bool = True, weights: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """mean, std, crop_pct and interpolation, as timm says of these weights; {} without pretrained weights.

        Raises:
            UserError: a name that timm lacks.
        """
        if not pretrained and weights is None:
            return {}
        import timm

        _check_name(name)
        own = timm.get_pretrained_cfg(name)
        found = {key: getattr(own, key) for key in ("mean", "std", "crop_pct", "interpolation")} if own else {}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}

    def shard_units(self) -> list[nn.Module]:
        """The members of the outermost sequences: a ViT's blocks, a ResNet's or ConvNeXt's stages."""
        sequences = [child for child in self.backbone.children() if isinstance(child, nn.Sequential | nn.ModuleList)]
        units = [unit for sequence in sequences for unit in sequence]
        return [unit for unit in units if len(list(unit.children())) > 0 and len(list(unit.parameters())) > 0]

    def head_names(self) -> list[str]:
        return [f"backbone.{name}" for name in _names(self.backbone.pretrained_cfg.get("classifier"))]

    def layer_numbers(self) -> dict[str, int]:
        """timm's own."""
        from timm.models import group_parameters

        found = group_parameters(self.backbone, self.backbone.group_matcher(coarse=False), reverse=True)
        return {f"backbone.{name}": number for name, number in found.items()}

    def undecayed_names(self) -> set[str]:
        """timm's own."""
        return {f"backbone.{name}" for name in getattr(self.backbone, "no_weight_decay", set)()}

    def adapted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state dict of this net built for another image size: position embeddings resampled, as timm does it.

        Returns:
            The same dict where there is nothing to do.
        """
        adapt = getattr(sys.modules[type(self.backbone).__module__], "checkpoint_filter_fn", None)
        own, prefix = self.state_dict(), "backbone."
        place, patch = f"{prefix}pos_embed", f"{prefix}patch_embed.proj.weight"
        held = all(name in own and name in state for name in (place, patch))
        if (
            adapt is None
            or not held
            or own[place].shape == state[place].shape
            or own[patch].shape != state[patch].shape
        ):
            return state
        return {
            f"{prefix}{key}": value
            for key, value in adapt({key.removeprefix(prefix): v for key, v in state.items()}, self.backbone).items()
        }

    def stages(self) -> list[nn.Module]:
        """Patch embedding, each block, norm, head.

        Raises:
            UserError: the model is not a plain VisionTransformer.
        """
        from timm.models.vision_transformer import VisionTransformer

        if type(self.backbone).forward_features is not VisionTransformer.forward_features:
            raise UserError(
                f"timm's {type(self.backbone).__name__} does not name its stages: "
                "trainer=model_parallel works with vit_* names, alexnet, alexnet_bn, small_cnn and airbench."
            )
        vit = self.backbone
        return [_PatchEmbedding(vit), *vit.blocks, vit.norm, _Head(vit)]


class _PatchEmbedding(nn.Module):
    """What VisionTransformer does before its blocks. Holds the same parameter objects, so it can be moved by itself."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        for name, module in vit.named_children():
            if name not in ("blocks", "norm", *HEAD_NAMES):
                self.add_module(name, module)
        for name, parameter in vit.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        self._vit = (vit,)  # in a tuple: not a child, or all of it would be moved along

    def forward(self, images: Tensor) -> Tensor:
        vit = self._vit[0]
        return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))


class _Head(nn.Module):
    """What VisionTransformer does after its norm."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        for name in HEAD_NAMES:
            if getattr(vit, name, None) is not None:
                self.add_module(name, getattr(vit, name))
        self._vit = (vit,)

    def forward(self, tokens: Tensor) -> Tensor:
        return self._vit[0].forward_head(tokens)


def vit_tiny_32(
    num_classes: int,
    image_size: int,
    channels: int,
    pretrained: bool = False,
    weights: str | None = None,
    patch_size: int = 4,
    embed_dim: int = 192,
    depth: int = 6,
    num_heads: int = 3,
    drop_path_rate: float | None = None,
) -> TimmModel:
    """A ViT for small images that a CPU can train."""
    return TimmModel(
        num_classes, image_size, channels, "vit_tiny_patch16_224", pretrained, weights, patch_size=patch_size,
        embed_dim=embed_dim, depth=depth, num_heads=num_heads, drop_path_rate=drop_path_rate,
    )  # fmt: skip


def _check_name(name: str | None) -> None:
    import timm

    if name is None:
        raise UserError("model=timm builds what model.name says, e.g. model.name=resnet18: any of timm.list_models().")
    if timm.is_model(name.partition(".")[0]):
        return
    close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
    advice = f"closest: {', '.join(close)}" if close else "see timm.list_models()"
    raise UserError(f"timm has no model named {name} (model.name); {advice}.")


def _create(name: str, image_size: int, settings: dict[str, Any]) -> nn.Module:
    """With img_size where the model takes one: convolutional ones refuse the argument and take every size."""
    import timm

    logging.getLogger("huggingface_hub").handlers.clear()  # what it says is shown by ours, once
    nowhere = _unknown_hub() if settings["pretrained"] else None
    try:
        try:
            return timm.create_model(name, img_size=image_size, **settings)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            return timm.create_model(name, **settings)
    except Exception as error:  # the hub's client raises many kinds: OSError, its own, its HTTP library's
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, TypeError):
            raise UserError(f"{name} does not take one of the model's arguments ({said}).") from error
        if settings["pretrained"]:
            said = f"no network: {nowhere} is not found from here, and they are not in its cache" if nowhere else said
            raise UserError(
                f"the pretrained weights of {name} cannot be had ({said}): give a local file with "
                "model.weights=FILE, or train from scratch with model.pretrained=false."
            ) from error
        raise UserError(f"{name} cannot be built for data.image_size={image_size} ({said}).") from error


def _unknown_hub() -> str | None:
    """The hub's host where its name is not found: its client then uses its cache alone, instead of a minute's retries.

    None where it is found, or a proxy looks for it.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname or ""
    if getproxies():
        return None
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        constants.HF_HUB_OFFLINE = True
        return host
    return None


@torch.no_grad()
def _zero(backbone: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        for parameter in backbone.get_submodule(name).parameters():
            parameter.zero_()


def _load(backbone: nn.Module, path: Path, model_name: str, channels: int) -> bool:
    """Adapt position embedding and channels as timm does; keep the head where its shape fits.

    Returns:
        Whether the head is new.
    Raises:
        UserError: a weight is missing, left over or of another shape.
    """
    from timm.models import adapt_input_conv

    state = _read_weights(path)
    adapt = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    config, own = backbone.pretrained_cfg, backbone.state_dict()
    problem = ""
    try:
        state = dict(adapt(state, backbone)) if adapt else state
        for name in _names(config.get("first_conv")):
            if f"{name}.weight" in state and state[f"{name}.weight"].shape[1] != channels:
                state[f"{name}.weight"] = adapt_input_conv(channels, state[f"{name}.weight"])
    except Exception as error:  # timm's filters index what they expect to find
        problem = f"{type(error).__name__}: {error}"
    head = [f"{name}.{kind}" for name in _names(config.get("classifier")) for kind in ("weight", "bias")]
    if any(name in state and name in own and state[name].shape != own[name].shape for name in head):
        state = {name: value for name, value in state.items() if name not in head}
    problem = problem or _difference(own, state, may_lack=set(head))
    if problem:
        raise UserError(f"model.weights={path} does not fit {model_name}: {problem}.")
    backbone.load_state_dict(state, strict=False)
    return any(name in own and name not in state for name in head)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _difference(own: dict[str, Tensor], state: dict[str, Tensor], may_lack: set[str]) -> str:
    """The first of what a state dict lacks, has too much or in another shape; empty where it fits."""
    lacking = [name for name in own if name not in state and name not in may_lack]
    extra = [name for name in state if name not in own]
    shapes = [name for name in own if name in state and own[name].shape != state[name].shape]
    if lacking:
        return f"it lacks {len(lacking)} of {len(own)} weights, {lacking[0]} first"
    if shapes:
        return f"{shapes[0]} is {tuple(state[shapes[0]].shape)}, the model's {tuple(own[shapes[0]].shape)}"
    return f"it has {len(extra)} weights too many, {extra[0]} first" if extra else ""


def _read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict of a local file, without running anything that it contains.

    Raises:
        UserError: no such file, or not a file of tensors by name.
    """
    if not path.is_file():
        raise UserError(f"model.weights={path} is no file: it takes a local .safetensors or .pth file.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = load_plain(path, path)
    except Exception as error:  # both libraries raise many kinds; every one means that this is no file of weights
        raise UserError(
            f"model.weights={path} cannot be read as weights ({' '.join(str(error).split())[:300]}): "
            "it takes a .safetensors file or a .pth file of tensors by name."
        ) from error
    state = content
    if isinstance(content, dict):
        state = next((content[key] for key in ("state_dict", "model") if key in content), content)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"model.weights={path} holds no state dict: it takes tensors by name.")
    return state


@torch.no_grad()
def _check_image_size(backbone: nn.Module, name: str, image_size: int, channels: int) -> None:
    """By the patch size where there is one (timm would drop the rest of the image), else by a trial run."""
    patch = getattr(getattr(backbone, "patch_embed", None), "patch_size", None)
    if patch is not None:
        side = patch[0] if isinstance(patch, tuple) else patch
        if image_size % side:
            sizes = sorted({max(side, image_size // side * side), (image_size // side + 1) * side})
            raise UserError(
                f"{name} cuts images into patches of {side} px and cannot take data.image_size={image_size}; "
                f"{' or '.join(map(str, sizes))} works."
            )
        return
    if next(backbone.parameters()).is_meta:
        return
    backbone.eval()
    try:
        backbone(torch.zeros(1, channels, image_size, image_size, dtype=next(backbone.parameters()).dtype))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(f"{name} cannot take data.image_size={image_size}: {str(error).splitlines()[0]}") from error
    finally:
        backbone.train()
