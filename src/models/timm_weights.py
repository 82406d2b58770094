"""Load pretrained weights of timm: from the hub, without a network, or from a local file."""

import difflib
import logging
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lockstep.process.errors import UserError

# LightningModules, DDP and torch.compile put these before the names of weights.
PREFIXES = ("net.", "model.", "backbone.", "module.", "_orig_mod.")


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
    offline_reason = go_offline_without_network() if name.startswith("hf") else ""
    try:
        return resolve_model_input_args(name)["pretrained_cfg"]
    except Exception as error:
        # timm, the client of the hub and its HTTP library raise many kinds of errors.
        reason = offline_reason or one_line(error)
        raise UserError(f"model.name={name} cannot be used ({reason}).") from error


def go_offline_without_network() -> str:
    """Make the hub's client use only its cache if the host name of the hub is not found.

    Otherwise the client would retry for a minute.

    Returns:
        A sentence for errors; "" if the name is found, or if a proxy has to find it.
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


def load_weights(backbone: nn.Module, path: Path, name: str, channels: int) -> bool:
    """Load the weights in a file as timm does: averaged weights come first.

    Names, position embeddings, input channels and head are adapted to the model.

    Returns:
        Whether the head is new.

    Raises:
        UserError: there is no such file, it has no weights, or a weight is missing, unexpected or
            of another shape.
    """
    state = _read_weights(path)
    try:
        state = filter_state(_strip_prefixes(state, backbone), backbone)
        _adapt_channels(state, backbone, channels)
        is_head_new = _replace_head(state, backbone)
        backbone.load_state_dict(state)
    except Exception as error:
        # timm's filters fail with any kind of error if a weight that they expect is missing.
        raise UserError(f"model.weights={path} does not fit {name}: {one_line(error)}.") from error
    return is_head_new


def _read_weights(path: Path) -> dict[str, Tensor]:
    from timm.models import load_state_dict

    if not path.is_file():
        raise UserError(
            f"model.weights={path} is not a file: give a local .safetensors or .pth file."
        )
    if rank_zero_only.rank == 0:
        # At this level timm logs which weights of the file it has taken.
        logging.getLogger("timm").setLevel(logging.INFO)
    try:
        return load_state_dict(str(path))
    except Exception as error:
        # A damaged file makes torch and safetensors raise nearly anything.
        raise UserError(
            f"model.weights={path} cannot be read as weights ({one_line(error)}): give a "
            ".safetensors file or a .pth file of tensors by name. If you trust the file, this "
            "converts it: torch.save(torch.load(FILE, weights_only=False)['state_dict'], "
            "'weights.pth'), with .state_dict() where FILE holds a whole net."
        ) from error


def _strip_prefixes(state: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """Return the weights without the prefixes of a LightningModule, DDP or torch.compile."""
    names = backbone.state_dict().keys()
    # One prefix may follow another, in any order.
    for prefix in PREFIXES * 2:
        stripped = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
        if stripped and not any(name.startswith(prefix) for name in names):
            state = stripped
    return state


def _adapt_channels(state: dict[str, Tensor], backbone: nn.Module, channels: int) -> None:
    """Adapt the weights of the first convolutions to the number of input channels."""
    from timm.models import adapt_input_conv

    shapes = shapes_by_name(backbone)
    for layer in layer_names(backbone, "first_conv"):
        name = f"{layer}.weight"
        if name in state and name in shapes and state[name].shape[1] != shapes[name][1]:
            state[name] = adapt_input_conv(channels, state[name])


def _replace_head(state: dict[str, Tensor], backbone: nn.Module) -> bool:
    """Replace a head that does not fit by that of the backbone. Return whether it was replaced."""
    shapes = shapes_by_name(backbone)
    heads = []
    for layer in layer_names(backbone, "classifier"):
        heads += [f"{layer}.weight", f"{layer}.bias"]
    if all(key in state and state[key].shape == shapes[key] for key in heads if key in shapes):
        return False

    initial = backbone.state_dict()
    for key in heads:
        state.pop(key, None)
        if key in initial:
            state[key] = initial[key]
    return True


def shapes_by_name(backbone: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in backbone.state_dict().items()}


def filter_state(state: dict[str, Tensor], backbone: nn.Module) -> dict[str, Tensor]:
    """Return a state dict with the names and the position embeddings of this model.

    timm has a filter for this in most families of models.
    """
    adapt = getattr(sys.modules[type(backbone).__module__], "checkpoint_filter_fn", None)
    if adapt:
        state = adapt(state, backbone)
    return dict(state)


def layer_names(backbone: nn.Module, kind: str) -> tuple[str, ...]:
    """Return the names of the layers that timm calls `classifier` or `first_conv`."""
    names = backbone.pretrained_cfg.get(kind) or ()
    if isinstance(names, str):
        return (names,)
    return tuple(names)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
