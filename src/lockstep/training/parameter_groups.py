"""Parameters for fine-tuning: groups with their own learning rate and weight decay, or frozen.

Without such an option, the optimizer gets all parameters as one group.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lockstep.runs.errors import UserError
from lockstep.strategies.sync_batchnorm import BATCH_NORMS

BACKBONE = "backbone"  # everything but the head

Group = dict[str, Any]  # as torch's optimizers take it


@dataclass(frozen=True)
class GroupRules:
    """
    Args:
        layer_decay: ratio of a layer's learning rate to that of the next layer; the head has the full rate.
        head_lr_factor: factor of the head's learning rate.
        decay_norms: weight decay also on norms, biases, position embeddings and tokens.
    Raises:
        UserError: a value out of its range.
    """

    layer_decay: float | None = None
    head_lr_factor: float = 1.0
    decay_norms: bool = True

    def __post_init__(self) -> None:
        decay, factor = self.layer_decay, self.head_lr_factor
        if decay is not None and not (isinstance(decay, int | float) and 0 < decay <= 1):
            raise UserError(f"optimizer.layer_decay={decay}: give a number above 0 and up to 1, or null.")
        if not (isinstance(factor, int | float) and factor > 0):
            raise UserError(f"optimizer.head_lr_factor={factor}: give a number above 0.")


RULES = tuple(GroupRules.__dataclass_fields__)


def parameter_groups(
    net: nn.Module, trained: Iterable[tuple[str, nn.Parameter]], rules: GroupRules, lr: float
) -> list[Group]:
    """One group for each learning rate and weight decay, as timm's param_groups_layer_decay makes them.

    Args:
        trained: by their names in `net`; of other names for parameters beside it.
        lr: the optimizer's.
    Returns:
        Groups whose `lr` is theirs and whose `lr_scale` says what part of the optimizer's that is.
    """
    head, layers = head_names(net), layer_numbers(net)
    last = max(layers.values(), default=0)
    undecayed: set[str] = getattr(net, "undecayed_names", set)()
    groups: dict[tuple[float, bool], Group] = {}
    for name, parameter in trained:
        scale = (rules.layer_decay or 1.0) ** (last - layers.get(name, last))
        scale *= rules.head_lr_factor if name in head else 1.0
        is_decayed = rules.decay_norms or not (
            parameter.ndim <= 1 or name.endswith(".bias") or any(fnmatchcase(name, form) for form in undecayed)
        )
        group = groups.setdefault((scale, is_decayed), {"params": [], "lr": lr * scale, "lr_scale": scale})
        group["params"].append(parameter)
        if not is_decayed:
            group["weight_decay"] = 0.0
    return list(groups.values())


def head_names(net: nn.Module) -> set[str]:
    """Return the parameters of the layer that gives the logits: as the net says, else the layer of its last matrix."""
    names = [name for name, _ in net.named_parameters()]
    heads: list[str] = getattr(net, "head_names", list)()
    if not heads:
        matrices = [name for name, parameter in net.named_parameters() if parameter.ndim >= 2]
        heads = [matrices[-1].rpartition(".")[0]] if matrices else []
    return {name for name in names if any(name.startswith(f"{head}.") for head in heads)}


def layer_numbers(net: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter, 0 at the images: as the net says, else its stages, else its children."""
    if hasattr(net, "layer_numbers"):
        return net.layer_numbers()
    parts = net.stages() if hasattr(net, "stages") else list(net.children())
    parts = [part for part in parts if any(True for _ in part.parameters())]
    layer_of = {id(parameter): number for number, part in enumerate(parts) for parameter in part.parameters()}
    return {name: layer_of.get(id(parameter), 0) for name, parameter in net.named_parameters()}


def freeze(net: nn.Module, stated: str | Sequence[str]) -> None:
    """Freeze by model.freeze; BatchNorm in a part that is frozen as a whole stays in evaluation mode.

    Args:
        stated: "backbone", or patterns of names of parameters and modules, as blocks.0 or blocks.[0-5].*
    Raises:
        UserError: a pattern that matches nothing, or nothing is left to train.
    """
    parameters = dict(net.named_parameters())
    short = {name: name.removeprefix(f"{BACKBONE}.") for name in parameters}  # as timm names them
    frozen: set[str] = set()
    for pattern in [stated] if isinstance(stated, str) else stated:
        forms = (pattern, f"{pattern}.*")
        found = {each for each in short if any(fnmatchcase(name, f) for name in (each, short[each]) for f in forms)}
        if pattern == BACKBONE:
            found = parameters.keys() - head_names(net)
        if not found:
            names = list(short.values())
            raise UserError(
                f"model.freeze={pattern!r} matches no parameter: take {BACKBONE}, or patterns of names as {names[0]} "
                f"and {names[-1]}."
            )
        frozen |= found
    if all(name in frozen or not parameter.requires_grad for name, parameter in parameters.items()):
        raise UserError(f"model.freeze={stated!r} matches every parameter: leave at least the head to train.")
    for name in frozen:
        parameters[name].requires_grad_(False)
    for name, part in net.named_modules():
        own = {f"{name}.{inner}".lstrip(".") for inner, _ in part.named_parameters()}
        for layer in part.modules() if own and own <= frozen else ():
            if isinstance(layer, BATCH_NORMS):  # also if Lightning, timm or an average sets the net to training
                layer.eval()
                layer.__dict__["train"] = lambda mode=True, layer=layer: layer
