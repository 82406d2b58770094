"""Parameters for fine-tuning: groups with their own learning rate and weight decay, or frozen.

Without such an option, the optimizer gets all parameters as one group.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn

from lockstep.process.errors import UserError

# model.freeze=backbone means everything but the head.
BACKBONE = "backbone"

# A group has the form that torch's optimizers take.
Group = dict[str, Any]


@dataclass(frozen=True)
class GroupRules:
    """The learning rates and the weight decay of parts of a net.

    Args:
        layer_decay: ratio of a layer's learning rate to that of the next layer; the head has the
            full rate.
        head_lr_factor: factor of the head's learning rate.
        decay_norms: weight decay also on norms, biases, position embeddings and tokens.

    Raises:
        UserError: a value out of its range.
    """

    layer_decay: float | None = None
    head_lr_factor: float = 1.0
    decay_norms: bool = True

    def __post_init__(self) -> None:
        decay = self.layer_decay
        if decay is not None and not (_is_positive(decay) and decay <= 1):
            raise UserError(
                f"optimizer.layer_decay={decay}: give a number above 0 and up to 1, or null."
            )
        if not _is_positive(self.head_lr_factor):
            raise UserError(
                f"optimizer.head_lr_factor={self.head_lr_factor}: give a number above 0."
            )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


RULES = tuple(GroupRules.__dataclass_fields__)


def parameter_groups(
    net: nn.Module,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    rules: GroupRules,
    lr: float,
    head_beside_net: Set[str] = frozenset(),
) -> list[Group]:
    """Return one group for each pair of a learning rate and a weight decay.

    With layer_decay 0.5 the head has the optimizer's rate, the last block half of it, and the block
    before a quarter. The groups are those of timm's param_groups_layer_decay.

    Args:
        named_parameters: the parameters to train with their names. Those beside the net have the
            full rate.
        lr: the optimizer's learning rate.
        head_beside_net: the names of the parameters of a head that the task has beside the net.

    Returns:
        Groups with their own `lr`, and `lr_scale`, its ratio to the optimizer's.
    """
    head = head_names(net)
    layers = layer_numbers(net)
    # A parameter beside the net may have a name that is also in the net.
    name_in_net = {id(parameter): name for name, parameter in net.named_parameters()}
    last_layer = max(layers.values(), default=0)
    names_without_decay: set[str] = (
        net.undecayed_names() if hasattr(net, "undecayed_names") else set()
    )

    groups: dict[tuple[float, bool], Group] = {}
    for name, parameter in named_parameters:
        if id(parameter) in name_in_net:
            name = name_in_net[id(parameter)]
            depth = last_layer - layers.get(name, last_layer)
            is_head = name in head
        else:
            depth = 0
            is_head = name in head_beside_net

        scale = (rules.layer_decay or 1.0) ** depth
        if is_head:
            scale *= rules.head_lr_factor
        is_decayed = rules.decay_norms or _has_weight_decay(name, parameter, names_without_decay)

        key = (scale, is_decayed)
        if key not in groups:
            groups[key] = {"params": [], "lr": lr * scale, "lr_scale": scale}
            if not is_decayed:
                groups[key]["weight_decay"] = 0.0
        groups[key]["params"].append(parameter)
    return list(groups.values())


def _has_weight_decay(name: str, parameter: nn.Parameter, names_without_decay: set[str]) -> bool:
    """Return whether a parameter is neither a norm, nor a bias, nor one that the net excludes."""
    if parameter.ndim <= 1 or name.endswith(".bias"):
        return False
    return not any(fnmatchcase(name, pattern) for pattern in names_without_decay)


def head_names(net: nn.Module) -> set[str]:
    """Return the parameters of the layer that gives the logits.

    If the net does not name it, it is the layer of the last matrix.
    """
    names = [name for name, _ in net.named_parameters()]
    heads: list[str] = net.head_names() if hasattr(net, "head_names") else []
    if not heads:
        matrices = [name for name, parameter in net.named_parameters() if parameter.ndim >= 2]
        heads = [name.rpartition(".")[0] for name in matrices[-1:]]

    prefixes = tuple(f"{head}." for head in heads)
    return {name for name in names if name.startswith(prefixes)}


def layer_numbers(net: nn.Module) -> dict[str, int]:
    """Return the layer of each parameter, 0 at the images.

    If the net does not number them, its stages count or, without stages, its children.
    """
    if hasattr(net, "layer_numbers"):
        return net.layer_numbers()

    parts = net.stages() if hasattr(net, "stages") else net.children()
    layer_of: dict[int, int] = {}
    number = 0
    for part in parts:
        parameters = list(part.parameters())
        layer_of |= dict.fromkeys(map(id, parameters), number)
        # A part without parameters is no layer.
        if parameters:
            number += 1
    return {name: layer_of.get(id(parameter), 0) for name, parameter in net.named_parameters()}


def freeze(net: nn.Module, patterns: str | Sequence[str]) -> None:
    """Freeze the parameters that model.freeze names.

    A part that is frozen as a whole stays in evaluation mode.

    Args:
        patterns: "backbone", or patterns of names of parameters and modules, as blocks.0 or
            blocks.[0-5].*

    Raises:
        UserError: a pattern matches nothing, or nothing is left to train.
    """
    parameters = dict(net.named_parameters())
    frozen_names: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        frozen_names |= _matching_names(net, pattern)

    is_trained = [
        parameter.requires_grad and name not in frozen_names
        for name, parameter in parameters.items()
    ]
    if not any(is_trained):
        raise UserError(
            f"model.freeze={patterns!r} matches every parameter: leave at least the head to train."
        )
    for name in frozen_names:
        parameters[name].requires_grad_(False)
    _keep_in_evaluation_mode(net, frozen_names)


def _matching_names(net: nn.Module, pattern: str) -> set[str]:
    """Return the parameters that a pattern names, also without the `backbone.` that timm omits."""
    names = [name for name, _ in net.named_parameters()]
    if pattern == BACKBONE:
        matching_names = set(names) - head_names(net)
    else:
        matching_names = {name for name in names if _matches(name, pattern)}
    if matching_names:
        return matching_names

    first_name = names[0].removeprefix(f"{BACKBONE}.")
    last_name = names[-1].removeprefix(f"{BACKBONE}.")
    raise UserError(
        f"model.freeze={pattern!r} matches no parameter: take {BACKBONE}, "
        f"or patterns of names as {first_name} and {last_name}."
    )


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern names a parameter, or a module that holds it."""
    for spelling in (name, name.removeprefix(f"{BACKBONE}.")):
        if fnmatchcase(spelling, pattern) or fnmatchcase(spelling, f"{pattern}.*"):
            return True
    return False


def _keep_in_evaluation_mode(net: nn.Module, frozen_names: set[str]) -> None:
    """Keep the parts whose parameters are all frozen in evaluation mode.

    Their BatchNorm statistics stay, and their dropout does nothing.
    """
    for name, part in net.named_modules():
        names = {f"{name}.{inner}".lstrip(".") for inner, _ in part.named_parameters()}
        if not names or not names <= frozen_names:
            continue
        for layer in part.modules():
            layer.training = False
            # Lightning, timm or an average may set the net to training, but not this layer.
            layer.__dict__["train"] = partial(_keep_mode, layer)


def _keep_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    """Take the place of a layer's method `train`, and change nothing."""
    return layer
