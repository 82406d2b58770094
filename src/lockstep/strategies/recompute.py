"""Activation checkpointing: a unit frees its activations and recomputes them in backward.

Less memory, about a third more time, under every strategy.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.runs.errors import UserError
from lockstep.strategies.sync_batchnorm import BATCH_NORMS


def recompute_activations(net: nn.Module) -> None:
    """Recompute the net's `shard_units()`; their names, parameters and values stay.

    Raises:
        UserError: the net names no units, or one of them has BatchNorm, whose statistics would count twice.
    """
    units: list[nn.Module] = getattr(net, "shard_units", list)()
    has_norm = any(isinstance(layer, BATCH_NORMS) for unit in units for layer in unit.modules())
    if not units or has_norm:
        why = "computes BatchNorm's statistics twice" if has_norm else f"needs shard_units() of {type(net).__name__}"
        raise UserError(f"trainer.activation_checkpointing=true {why}: leave it off for this model.")
    for unit in units:
        unit.__class__ = _recomputed(type(unit))


@cache
def _recomputed(cls: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that recomputes; DataParallel's replicas and averaged copies have it too."""

    def forward(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            return checkpoint(super(found, self).forward, *inputs, use_reentrant=False, **named)
        return super(found, self).forward(*inputs, **named)

    found = type(f"Recomputed{cls.__name__}", (cls,), {"forward": forward, "__module__": cls.__module__})
    return found
