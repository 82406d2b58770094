"""Config node → object: the only place that builds what a `_target_` names, and refuses what is not ours."""

import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lockstep.runs.errors import UserError

ROOMS = (
    "models", "data", "optimizers", "schedulers", "callbacks", "classifier", "lockstep.strategies",
    "lockstep.callbacks",
)  # fmt: skip
LIBRARIES = (
    "torch.optim", "torch.nn", "lightning.pytorch.callbacks", "lightning.pytorch.loggers",
    "lightning.pytorch.profilers", "lightning.pytorch.strategies",
)  # fmt: skip


def check_targets(config: Any, where: str = "config") -> None:
    """Refuse any `_target_` outside our rooms and the libraries above, looked up to the object it really names.

    Raises:
        UserError: names the key and the target.
    """
    if isinstance(config, dict):
        if "_target_" in config:
            resolve_target(config["_target_"], f"{where}._target_")
        for key, value in config.items():
            check_targets(value, f"{where}.{key}")
    elif isinstance(config, list):
        for index, value in enumerate(config):
            check_targets(value, f"{where}[{index}]")


def resolve_target(target: Any, where: str) -> Any:
    """The class or function that a `_target_` names."""
    refused = UserError(
        f"{where}={target!r} is not allowed: a config builds only classes of {', '.join(ROOMS)} "
        f"and of {', '.join(LIBRARIES)}."
    )
    if not isinstance(target, str) or not _inside(target):
        raise refused
    module_name, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{where}={target!r} cannot be found: {error}.") from None
    if not (inspect.isclass(found) or inspect.isfunction(found)) or not _inside(f"{found.__module__}.x"):
        raise refused
    return found


def _inside(dotted: str) -> bool:
    return any(dotted.startswith(f"{home}.") for home in ROOMS + LIBRARIES)


def options_of(target: Any) -> tuple[Mapping[str, Any], bool]:
    """(its parameters by name, whether it takes any other name); what a class hands on as **options, its bases name."""
    names: dict[str, inspect.Parameter] = {}
    for owner in target.__mro__ if inspect.isclass(target) and _is_ours(target) else (target,):
        if owner is not target and ("__init__" not in vars(owner) or not _is_ours(owner)):
            continue
        found = inspect.signature(owner).parameters
        names = {**found, **names}
        if not any(p.kind is p.VAR_KEYWORD for p in found.values()):
            return {name: p for name, p in names.items() if p.kind is not p.VAR_KEYWORD}, False
    return names, True


def _is_ours(target: Any) -> bool:
    return target.__module__.split(".")[0] in (*ROOMS, "lockstep")


def build(node: Any, known: Mapping[str, Any] | None = None) -> Any:
    """What a config node describes: `_target_` called with the other keys, or a partial of it with `_partial_`.

    This is hydra.utils.instantiate cut down to plain values: nothing but `_target_` chooses code, and what the run
    knows is handed over as it is, never searched for more nodes.

    Args:
        known: what the run knows (folder, run_id, …): passed where the constructor has a parameter of that name.
    Raises:
        UserError: an option that the target does not have.
    """
    if isinstance(node, list):
        return [build(value) for value in node]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: build(value) for key, value in node.items()}
    target = resolve_target(node["_target_"], "_target_")
    parameters, any_name = options_of(target)
    stated = {key: build(value) for key, value in node.items() if key not in ("_target_", "_partial_")}
    given = {key: value for key, value in (known or {}).items() if key in parameters and key not in stated}
    unknown = stated.keys() - parameters.keys()
    if unknown and not any_name:
        raise UserError(f"{node['_target_']} has no option {sorted(unknown)[0]!r}; it has {', '.join(parameters)}.")
    if node.get("_partial_"):
        return functools.partial(target, **stated)
    return target(**stated, **given)
