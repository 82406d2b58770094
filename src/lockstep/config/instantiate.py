"""Config node → object: what a `_target_` of the user's own configs and command line names.

Such a config may name any class that can be imported: it is the user's machine. A config from outside never comes here:
config/from_outside.py makes words of this clone's command line out of it.
"""

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lockstep.runs.errors import UserError

OURS = (
    "models", "data", "augmentations", "losses", "metrics", "optimizers", "schedulers", "callbacks", "classifier",
    "lockstep",
)  # hand **options on  # fmt: skip


def resolve_target(target: Any, where: str) -> Any:
    """The class or function that a `_target_` names.

    Raises:
        UserError: there is none of that name; names the key.
    """
    module_name, _, name = str(target).rpartition(".")
    if not isinstance(target, str) or not module_name:
        raise UserError(f"{where}={target!r} names no class: write package.module.Class.")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{where}={target!r} cannot be found: {error}.") from None
    if not callable(found):
        raise UserError(f"{where}={target!r} is neither a class nor a function.")
    return found


def options_of(target: Any) -> tuple[Mapping[str, Any], bool]:
    """(its parameters by name, whether it takes any other name); what a class hands on as **options, its bases name."""
    names: dict[str, inspect.Parameter] = {}
    for owner in target.__mro__ if inspect.isclass(target) and _is_ours(target) else (target,):
        if owner is not target and ("__init__" not in vars(owner) or not _is_ours(owner)):
            continue
        try:
            found = inspect.signature(owner).parameters
        except ValueError:  # some of C's
            return {}, True
        names = {**found, **names}
        if not any(p.kind is p.VAR_KEYWORD for p in found.values()):
            return {name: p for name, p in names.items() if p.kind is not p.VAR_KEYWORD}, False
    return names, True


def _is_ours(target: Any) -> bool:
    return target.__module__.split(".")[0] in OURS


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def build(node: Any, known: Mapping[str, Any] | None = None) -> Any:
    """What a config node describes: `_target_` called with the other keys, or a partial of it with `_partial_`.

    This is hydra.utils.instantiate cut down to plain values: what the run knows is handed over as it is, never
    searched for more nodes.

    Args:
        known: what the run knows (folder, run_id, …): passed where the constructor has a parameter of that name.
    Raises:
        UserError: an option that the target does not have, or one that it lacks.
    """
    if isinstance(node, list):
        return [build(value) for value in node]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: build(value) for key, value in node.items()}
    target = resolve_target(node["_target_"], "_target_")
    parameters, any_name = options_of(target)
    unknown = node.keys() - parameters.keys() - {"_target_", "_partial_"}
    if unknown and not any_name:
        raise UserError(f"{node['_target_']} has no option {sorted(unknown)[0]!r}; it has {', '.join(parameters)}.")
    stated = {key: build(value) for key, value in node.items() if key not in ("_target_", "_partial_")}
    given = {key: value for key, value in (known or {}).items() if key in parameters and key not in stated}
    if node.get("_partial_"):
        return functools.partial(target, **stated)
    if lacking := [name for name, p in parameters.items() if _is_needed(p) and name not in {**stated, **given}]:
        raise UserError(f"{node['_target_']} cannot be made without {', '.join(lacking)}.")
    return target(**stated, **given)
