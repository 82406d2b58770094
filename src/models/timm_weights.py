"""Load a file of weights into a model of timm."""

import logging
import sys
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lockstep.process.errors import UserError

# LightningModules, DDP and torch.compile put these before the names of weights.
PREFIXES = ("net.", "model.", "backbone.", "module.", "_orig_mod.")


def load_weights(backbone: nn.Module, path: Path, name: str, channels: int) -> bool:
    """Load a file as timm does: averaged weights first, with what differs adapted.

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
        # The filters of timm index what they expect to find.
        raise UserError(f"model.weights={path} does not fit {name}: {one_line(error)}.") from error
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
            f"model.weights={path} cannot be read as weights ({one_line(error)}): give a "
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

    shapes = shapes_by_name(backbone)
    for layer in layer_names(backbone, "first_conv"):
        name = f"{layer}.weight"
        if name in state and name in shapes and state[name].shape[1] != shapes[name][1]:
            state[name] = adapt_input_conv(channels, state[name])


def _replace_head(state: dict[str, Tensor], backbone: nn.Module) -> bool:
    """Take the backbone's own head, and return True, unless the one of the file fits."""
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
    """Return a state dict with this model's names and position embeddings.

    timm has a filter for most families.
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
