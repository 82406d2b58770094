"""Freeze parameters by model.freeze: training leaves them as they are."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from lockstep.runs.errors import UserError
from lockstep.strategies.sync_batchnorm import BATCH_NORMS
from lockstep.training.parameter_groups import head_names

BACKBONE = "backbone"  # everything but the head


def freeze(net: nn.Module, stated: str | Sequence[str]) -> None:
    """Frozen parameters need no gradient; BatchNorm in a part that is frozen as a whole stays in evaluation mode.

    Args:
        stated: "backbone", or patterns of names of parameters and modules, as blocks.0 or blocks.[0-5].*
    Raises:
        UserError: a pattern that matches nothing, or nothing is left to train.
    """
    patterns = [stated] if isinstance(stated, str) else list(stated)
    names = [name for name, _ in net.named_parameters()]
    frozen: set[str] = set()
    for pattern in patterns:
        found = set(names) - head_names(net) if pattern == BACKBONE else {n for n in names if matches(n, pattern)}
        if not found:
            raise UserError(
                f"model.freeze={pattern!r} matches no parameter: take {BACKBONE}, or patterns of names "
                f"as {_short(names[0])} and {_short(names[-1])}."
            )
        frozen |= found
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad and name not in frozen]
    if not trained:
        raise UserError(f"model.freeze={stated!r} matches every parameter: leave at least the head to train.")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in frozen)
    for name, part in net.named_modules():
        own = {f"{name}.{inner}".lstrip(".") for inner, _ in part.named_parameters()}
        if own and own <= frozen:
            for layer in part.modules():
                if isinstance(layer, BATCH_NORMS):
                    _stay_in_evaluation(layer)


def matches(name: str, pattern: str) -> bool:
    """The parameter's name or that of a module that holds it; a timm model's names may be timm's own."""
    own = name.removeprefix(f"{BACKBONE}.")
    return any(fnmatchcase(each, form) for each in (name, own) for form in (pattern, f"{pattern}.*"))


def _short(name: str) -> str:
    return name.removeprefix(f"{BACKBONE}.")


def _stay_in_evaluation(layer: nn.Module) -> None:
    """Whoever sets the net to training: Lightning before each epoch, timm, a copy for averaged weights."""
    layer.eval()
    layer.__dict__["train"] = lambda mode=True: layer
