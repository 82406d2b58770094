"""Any model of timm by its name (uses `_pos_embed` of its VisionTransformer, which has no public counterpart).

python src/train.py model=timm model.name=vit_small_patch16_224 model.pretrained=false
python src/train.py model=timm model.name=hf-hub:timm/resnet18.a1_in1k       (or local-dir:FOLDER)
"""

import argparse
import difflib
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lockstep.runs.errors import UserError

log = logging.getLogger(__name__)

HEAD_NAMES = ("attn_pool", "fc_norm", "head_drop", "head", "head_dist")  # what VisionTransformer.forward_head uses
STATES = ("state_dict_ema", "model_ema", "state_dict", "model")  # of a training checkpoint; timm takes averages first
PREFIXES = ("module.", "_orig_mod.", "net.", "model.", "backbone.")  # of DDP, torch.compile, LightningModules


class TimmModel(nn.Module):
    """The model `name` of timm, built for the classes, image size and channels of the data.

    A new head on trained weights starts at zero: every class is equally likely, and the loss is that of chance.

    Args:
        name: of timm.list_models(), with a tag for its weights or without, hf-hub:OWNER/NAME or local-dir:FOLDER.
        pretrained: load timm's weights, which may download them.
        weights: a local .safetensors or .pth file in place of the download; its head is kept if it fits.
        timm_arguments: for timm.create_model: patch_size, embed_dim, depth, num_heads, drop_path_rate, …
    Raises:
        UserError: timm has no such model, it does not take an argument or the image size, or the weights do not fit or
            cannot be loaded.
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
        from_timm = pretrained and weights is None
        config = pretrained_config(name)
        settings = {"num_classes": num_classes, "in_chans": channels, "pretrained": from_timm, **timm_arguments}
        self.backbone = _create(str(name), image_size, channels, settings)
        is_head_new = from_timm and config.get("num_classes") != num_classes
        if weights is not None:
            is_head_new = _load(self.backbone, Path(weights), str(name), channels)
        if is_head_new:
            for head in _classifiers(self.backbone):
                for parameter in self.backbone.get_submodule(head).parameters():
                    nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    @classmethod
    def wanted_images(
        cls, name: str | None = None, pretrained: bool = True, weights: str | None = None, **_: Any
    ) -> dict[str, Any]:
        """Return mean, std, crop_pct and interpolation of the pretrained weights; {} without pretrained weights."""
        config = pretrained_config(name) if pretrained or weights is not None else {}
        found = {key: config[key] for key in ("mean", "std", "crop_pct", "interpolation") if key in config}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in found.items()}

    def shard_units(self) -> list[nn.Module]:
        """Return the members of the outermost sequences: a ViT's blocks, a ResNet's or ConvNeXt's stages."""
        sequences = [child for child in self.backbone.children() if isinstance(child, nn.Sequential | nn.ModuleList)]
        units = [unit for sequence in sequences for unit in sequence]
        return [unit for unit in units if len(list(unit.children())) > 0 and len(list(unit.parameters())) > 0]

    def head_names(self) -> list[str]:
        return [f"backbone.{name}" for name in _classifiers(self.backbone)]

    def layer_numbers(self) -> dict[str, int]:
        """Return timm's layer of each parameter; of the few families that state none, each child is a layer."""
        from timm.models import group_parameters

        if not hasattr(self.backbone, "group_matcher"):
            layer_of = {name: number for number, (name, _) in enumerate(self.backbone.named_children())}
            names = [name for name, _ in self.backbone.named_parameters()]
            return {f"backbone.{name}": layer_of.get(name.split(".")[0], 0) for name in names}
        found = group_parameters(self.backbone, self.backbone.group_matcher(coarse=False), reverse=True)
        return {f"backbone.{name}": number for name, number in found.items()}

    def undecayed_names(self) -> set[str]:
        """Return timm's names of parameters that weight decay harms."""
        return {f"backbone.{name}" for name in getattr(self.backbone, "no_weight_decay", set)()}

    def adapted(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a state dict of this net for another image size with its position embeddings resampled by timm.

        It is the same dict if there is nothing to do.
        """
        own, prefix = self.state_dict(), "backbone."
        place, patch = f"{prefix}pos_embed", f"{prefix}patch_embed.proj.weight"
        shapes = [{name: each[name].shape for name in (place, patch) if name in each} for each in (own, state)]
        if not all(len(each) == 2 for each in shapes) or shapes[0] == shapes[1] or shapes[0][patch] != shapes[1][patch]:
            return state
        filtered = _filtered({key.removeprefix(prefix): value for key, value in state.items()}, self.backbone)
        return {f"{prefix}{key}": value for key, value in filtered.items()}

    def stages(self) -> list[nn.Module]:
        """Return patch embedding, each block, norm and head.

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
        first = [name for name, _ in vit.named_children() if name not in ("blocks", "norm", *HEAD_NAMES)]
        embedding = _Part(vit, first, _embed)
        for name, parameter in vit.named_parameters(recurse=False):
            embedding.register_parameter(name, parameter)
        return [embedding, *vit.blocks, vit.norm, _Part(vit, HEAD_NAMES, lambda whole, x: whole.forward_head(x))]


class _Part(nn.Module):
    """A part of a VisionTransformer with the same parameter objects, so that it can be moved to another device.

    Args:
        forward_part: computes its output from the whole net and the part's input.
    """

    def __init__(self, vit: nn.Module, children: Iterable[str], forward_part: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        for name in children:
            if getattr(vit, name, None) is not None:
                self.add_module(name, getattr(vit, name))
        self._vit, self.forward_part = (vit,), forward_part  # in a tuple: not a child, or all of it would be moved

    def forward(self, values: Tensor) -> Tensor:
        return self.forward_part(self._vit[0], values)


def _embed(vit: Any, images: Tensor) -> Tensor:
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))


def vit_tiny_32(
    num_classes: int, image_size: int, channels: int, weights: str | None = None, patch_size: int = 4,
    embed_dim: int = 192, depth: int = 6, num_heads: int = 3, drop_path_rate: float | None = None,
) -> TimmModel:  # fmt: skip
    """A ViT for small images that a CPU can train."""
    sizes = {"patch_size": patch_size, "embed_dim": embed_dim, "depth": depth, "num_heads": num_heads}
    name, own = "vit_tiny_patch16_224", {**sizes, "drop_path_rate": drop_path_rate}
    return TimmModel(num_classes, image_size, channels, name, False, weights, **own)


def pretrained_config(name: str | None) -> dict[str, Any]:
    """Return what timm says of the weights that a model name stands for.

    Raises:
        UserError: there is no such model or tag, or its config cannot be read.
    """
    import timm
    from timm.models import resolve_model_input_args

    if name is None:
        raise UserError("model=timm needs model.name, e.g. model.name=resnet18: any of timm.list_models().")
    if ":" not in name and not timm.is_model(name.partition(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        advice = f"closest: {', '.join(close)}" if close else "see timm.list_models()"
        raise UserError(f"timm has no model named {name} (model.name); {advice}.")
    offline = _without_network() if name.startswith("hf") else ""
    try:
        config: dict[str, Any] = resolve_model_input_args(name)["pretrained_cfg"]
        return config
    except Exception as error:  # timm's, the hub client's and its HTTP library's
        raise UserError(f"model.name={name} cannot be used ({offline or _one_line(error)}).") from error


def _create(name: str, image_size: int, channels: int, settings: dict[str, Any]) -> nn.Module:
    """Build the model and try it: with img_size if that works, otherwise at the size that it has by default."""
    import timm

    logging.getLogger("huggingface_hub").handlers.clear()  # Lockstep's handler shows its messages
    offline, problem = _without_network() if settings["pretrained"] else "", ""
    for size in ({"img_size": image_size}, {}):
        try:
            backbone = timm.create_model(name, **size, **settings)
        except Exception as error:  # timm's, the hub client's and its HTTP library's
            if size and isinstance(error, TypeError) and "img_size" in str(error):
                continue
            if problem:
                break
            if isinstance(error, TypeError):
                raise UserError(f"{name} does not take one of the model's arguments ({_one_line(error)}).") from error
            if settings["pretrained"]:
                raise UserError(
                    f"the pretrained weights of {name} cannot be loaded ({offline or _one_line(error)}): give a local "
                    "file with model.weights=FILE, or train from scratch with model.pretrained=false."
                ) from error
            raise UserError(f"{name} cannot be built for data.image_size={image_size} ({_one_line(error)}).") from error
        parameter = next(backbone.parameters())
        try:
            if not parameter.is_meta:
                with torch.no_grad():
                    backbone.eval()(torch.zeros(1, channels, image_size, image_size, dtype=parameter.dtype))
            return backbone.train()
        except Exception as error:  # assertions, shapes and indices of any model
            problem = problem or _one_line(error)
    raise UserError(f"{name} cannot take data.image_size={image_size} ({problem}).")


def _without_network() -> str:
    """Make the hub's client use its cache alone if the hub's name is not found: it would try again for a minute.

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


def _load(backbone: nn.Module, path: Path, name: str, channels: int) -> bool:
    """Load a file, with position embeddings and input channels adapted as timm does; return whether the head is new.

    Raises:
        UserError: a weight is missing, left over or of another shape.
    """
    from timm.models import adapt_input_conv

    own, is_head_new = backbone.state_dict(), False
    state = _read_weights(path, own)
    try:
        state = _filtered(state, backbone)
        first = backbone.pretrained_cfg.get("first_conv") or ()
        for weight in [f"{layer}.weight" for layer in ((first,) if isinstance(first, str) else first)]:
            if weight in state and weight in own and state[weight].shape[1] != own[weight].shape[1]:
                state[weight] = adapt_input_conv(channels, state[weight])
        head = [f"{layer}.{kind}" for layer in _classifiers(backbone) for kind in ("weight", "bias")]
        if any(key in own and (key not in state or state[key].shape != own[key].shape) for key in head):
            is_head_new = True
            state = {**{key: value for key, value in state.items() if key not in head},
                     **{key: own[key] for key in head if key in own}}  # fmt: skip
        backbone.load_state_dict(state)
    except Exception as error:  # timm's filters index what they expect to find
        raise UserError(f"model.weights={path} does not fit {name}: {_one_line(error)}.") from error
    return is_head_new


def _read_weights(path: Path, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict in a local file, averaged weights first, without running anything that it contains.

    Raises:
        UserError: there is no such file, or it holds no tensors by name.
    """
    if not path.is_file():
        raise UserError(f"model.weights={path} is not a file: give a local .safetensors or .pth file.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content = load_file(path)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):  # the options in timm's checkpoints
                content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # both libraries raise many kinds
        raise UserError(
            f"model.weights={path} cannot be read as weights ({_one_line(error)}): give a .safetensors file or a .pth "
            "file of tensors by name. If you trust the file, this converts it: torch.save(torch.load(FILE, "
            "weights_only=False)['state_dict'], 'weights.pth')."
        ) from error
    held: dict[str, Any] = content if isinstance(content, dict) else {}
    notes = [key for key in STATES if isinstance(held.get(key), dict)][:1]
    state: dict[str, Tensor] = held[notes[0]] if notes else held
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"model.weights={path} holds no state dict: give a file of tensors by name.")
    for prefix in PREFIXES * 2:  # one may lie within another
        if any(key.startswith(prefix) for key in state) and not any(key.startswith(prefix) for key in own):
            state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
            notes.append(f"prefix {prefix} removed")
    rank_zero_only(log.info)(f"model.weights={path}: {len(state)} tensors{''.join(f', {note}' for note in notes)}")
    return state


def _filtered(state: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """Return a state dict with the names and position embeddings of this model, by timm's filter for its family."""
    adapt = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    return dict(adapt(state, backbone)) if adapt else dict(state)


def _classifiers(backbone: nn.Module) -> tuple[str, ...]:
    names = backbone.pretrained_cfg.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
