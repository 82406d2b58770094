"""Store in a checkpoint which layers are frozen, and freeze the same ones in a resumed run.

A callback such as Lightning's BackboneFinetuning unfreezes layers when an epoch starts and adds
them to the optimizer. A resume within that epoch does not call that hook again.
"""

import logging
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.process.output import join_names

log = logging.getLogger(__name__)

# Plain values, as a checkpoint holds them.
FrozenState = dict[str, Any]
NAMES_IN_LOG = 3


def frozen_state(trainer: pl.Trainer) -> FrozenState:
    """Return which parameters are frozen now, and the names of those in each optimizer's groups.

    An optimizer that also has parameters of another module gets None in place of its groups.
    """
    module = trainer.lightning_module
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "parameters": {name: p.requires_grad for name, p in module.named_parameters()},
        "statistics": {
            name: norm.track_running_stats for name, norm in _layers_with_statistics(module).items()
        },
        "optimizers": [_names_of_groups(optimizer, names) for optimizer in trainer.optimizers],
    }


def set_frozen_state(trainer: pl.Trainer, state: FrozenState) -> None:
    """Freeze and unfreeze layers as `state` says, and add missing groups to the optimizers.

    Call it after the optimizers are built, and before their states are loaded.
    """
    module = trainer.lightning_module
    frozen, unfrozen = _set_requires_grad(module, state["parameters"])
    for name, norm in _layers_with_statistics(module).items():
        # BatchNorm of a frozen layer keeps its statistics.
        norm.track_running_stats = state["statistics"].get(name, norm.track_running_stats)

    parameters = dict(module.named_parameters())
    for optimizer, groups in zip(trainer.optimizers, state["optimizers"]):
        if groups is not None:
            _add_groups(optimizer, groups, parameters)
    if trainer.is_global_zero and frozen + unfrozen:
        log.info(f"As in the checkpoint, {_describe_changes(frozen, unfrozen)}.")


def _layers_with_statistics(module: nn.Module) -> dict[str, Any]:
    """Return the layers with running statistics. A frozen layer does not update them."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(layer, "track_running_stats")
    }


def _names_of_groups(optimizer: Optimizer, names: dict[int, str]) -> list[list[str]] | None:
    groups = []
    for group in optimizer.param_groups:
        if not all(id(parameter) in names for parameter in group["params"]):
            return None
        groups.append([names[id(parameter)] for parameter in group["params"]])
    return groups


def _set_requires_grad(
    module: nn.Module, is_trainable_of: dict[str, bool]
) -> tuple[list[str], list[str]]:
    """Freeze and unfreeze parameters; return the names of those frozen, and of those unfrozen."""
    frozen: list[str] = []
    unfrozen: list[str] = []
    for name, parameter in module.named_parameters():
        is_trainable = is_trainable_of.get(name, parameter.requires_grad)
        if is_trainable != parameter.requires_grad:
            parameter.requires_grad = is_trainable
            names = unfrozen if is_trainable else frozen
            names.append(name)
    return frozen, unfrozen


def _add_groups(
    optimizer: Optimizer, groups: list[list[str]], parameters: Mapping[str, Tensor]
) -> None:
    """Add the groups that a callback has added to the optimizer in the run.

    Their options, such as lr, come with the optimizer's state. If the first groups differ from
    those of the run, the optimizer is left as it is, and loading its state fails.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    current_groups = _names_of_groups(optimizer, names)
    if current_groups is None or current_groups != groups[: len(current_groups)]:
        return
    for group in groups[len(current_groups) :]:
        if all(name in parameters for name in group):
            optimizer.add_param_group({"params": [parameters[name] for name in group]})


def _describe_changes(frozen: list[str], unfrozen: list[str]) -> str:
    parts = []
    if unfrozen:
        parts.append(f"{_count_and_names(unfrozen)} that the module as built freezes are trained")
    if frozen:
        parts.append(f"{_count_and_names(frozen)} that the module as built trains are frozen")
    return ", and ".join(parts)


def _count_and_names(names: list[str]) -> str:
    return f"{len(names)} parameters ({join_names(names, NAMES_IN_LOG)})"
