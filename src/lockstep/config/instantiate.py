"""Build objects from config nodes with hydra.utils.instantiate, with its errors as one sentence.

A config of the user may name any class that can be imported. An untrusted config never comes here: config/foreign.py
takes no `_target_` from it.
"""

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.config.locate import locate
from lockstep.process.errors import UserError


def resolve_target(target: Any, where: str) -> Any:
    """Return the class or function that a `_target_` names; a UserError names the key if there is none."""
    located = locate(str(target), where)
    if not callable(located):
        raise UserError(f"{where}={target!r} is neither a class nor a function.")
    return located


def options_of(target: Any) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Return the parameters by name, with those of bases that `**options` may reach, and whether any name is taken."""
    names: dict[str, inspect.Parameter] = {}
    is_open = False
    for owner in target.__mro__ if inspect.isclass(target) else (target,):
        if owner is not target and "__init__" not in vars(owner):
            continue
        try:
            found = inspect.signature(owner).parameters
        except ValueError:  # some classes written in C
            return names, True
        names = {**found, **names}
        if not any(p.kind is p.VAR_KEYWORD for p in found.values()):
            break
        is_open = True
    return {name: p for name, p in names.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}, is_open


def build(node: Any, known: Mapping[str, Any] | None = None, values: Mapping[str, Any] | None = None) -> Any:
    """Build what a config node describes: call its `_target_` with the other keys, or return a partial of it.

    Args:
        known: values passed to the parameters of those names that the node leaves open, where there are such.
        values: options of the node that are objects, passed as they are.

    Raises:
        UserError: the class cannot be found, does not have such a parameter or lacks one.
    """
    if isinstance(node, list | tuple):
        return [build(value) for value in node]
    if not isinstance(node, Mapping) or "_target_" not in node:
        return node

    target = node["_target_"]
    parameters, takes_any_name = options_of(resolve_target(target, "_target_"))
    options = node.keys() - {"_target_", "_partial_"} | (values or {}).keys()
    if not takes_any_name:
        _refuse_unknown(options, parameters, target)

    arguments = dict(values or {})
    for key, value in (known or {}).items():
        if key in parameters and key not in options:
            arguments[key] = value
    return _instantiate(node, arguments, parameters)


def _refuse_unknown(options: Iterable[str], parameters: Mapping[str, Any], target: str) -> None:
    for key in sorted(set(options) - parameters.keys()):
        close = difflib.get_close_matches(key, parameters, 1)
        meant = f"did you mean {close[0]}? It" if close else "it"
        raise UserError(f"{target} has no option {key!r}: {meant} has {', '.join(parameters)}.")


def _instantiate(node: Mapping[str, Any], arguments: dict[str, Any], parameters: Mapping[str, Any]) -> Any:
    """Call the target with the node's options and the arguments; return a partial where the node asks for one."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        partial = instantiate(dict(node), _partial_=True, _convert_="all")
        if node.get("_partial_"):
            return partial
        return partial(**arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(" ".join(str(error).split())) from error
    except TypeError as error:
        # Only a call with the wrong arguments is the config's fault; any other TypeError is the class's own.
        if re.match(r"[\w.]+\(\) (got an unexpected|missing)", str(error)):
            names = ", ".join(parameters)
            raise UserError(f"{node['_target_']} cannot be made: {error}; it has {names}.") from error
        raise
