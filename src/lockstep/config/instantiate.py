"""Build objects from config nodes with Hydra's instantiate, with its errors as one sentence.

A config of the user may name any class that can be imported. An untrusted config never comes to
this file: config/foreign.py takes no `_target_` from it.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from lockstep.config.hydra_versions import instantiate
from lockstep.config.locate import locate
from lockstep.process.errors import UserError

VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
# Keys of a node that are for hydra.utils.instantiate, not arguments.
HYDRA_KEYS = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
# Parts of annotations, as `int | None`.
NUMBER = re.compile(r"\b(int|float)\b")
MAY_BE_NONE = re.compile(r"\b(None|Optional|Any)\b")
# The beginning of an annotation that takes a tuple, as `tuple[int, int] | None`.
TUPLE_ANNOTATION = re.compile(r"(<class '|typing\.|Optional\[|Union\[)*[Tt]uple\b")


def resolve_target(target: Any, where: str) -> Any:
    """Return the class or function that a `_target_` names.

    Args:
        where: the key of the config, for errors.
    Raises:
        UserError: there is no such class or function.
    """
    located = locate(str(target), where)
    if not callable(located):
        raise UserError(f"{where}={target!r} is neither a class nor a function.")
    return located


def parameters_of(target: Any) -> tuple[Mapping[str, inspect.Parameter], bool]:
    """Return the parameters of a class or function by name, and whether it takes any other name.

    The parameters of a base class count if `**options` of the class may reach them.
    """
    parameters: dict[str, inspect.Parameter] = {}
    takes_any_name = False
    for owner in target.__mro__ if inspect.isclass(target) else (target,):
        if owner is not target and "__init__" not in vars(owner):
            continue
        try:
            own_parameters = inspect.signature(owner).parameters.values()
        except ValueError:
            # Some classes are written in C.
            return parameters, True
        kinds = {parameter.kind for parameter in own_parameters}
        named = [parameter for parameter in own_parameters if parameter.kind not in VARIADIC]
        parameters = {**{parameter.name: parameter for parameter in named}, **parameters}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
        takes_any_name = True
    return parameters, takes_any_name


def build(
    node: Any,
    defaults: Mapping[str, Any] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Any:
    """Build what a config node describes: call its `_target_`, or return a partial of it.

    Args:
        defaults: values for parameters that the node does not set, by name.
        values: arguments that are objects already and are passed as they are, by name.

    Raises:
        UserError: the class cannot be found, lacks a parameter for an option, or needs one more.
    """
    if isinstance(node, list | tuple):
        return [build(value) for value in node]
    if not isinstance(node, Mapping) or "_target_" not in node:
        return node

    target = node["_target_"]
    arguments = dict(values or {})
    parameters, takes_any_name = parameters_of(resolve_target(target, "_target_"))
    options = node.keys() - {*HYDRA_KEYS} | arguments.keys()
    if not takes_any_name:
        _refuse_unknown(options, parameters, target)
    _refuse_null_numbers(node, parameters, target)
    options |= positional_parameters(node, parameters)
    for key in (defaults or {}).keys() & parameters.keys() - options:
        arguments[key] = (defaults or {})[key]
    return _instantiate(node, arguments, parameters)


def positional_parameters(node: Mapping[str, Any], parameters: Mapping[str, Any]) -> set[str]:
    """Return the parameters that the list `_args_` of a node fills."""
    return set(list(parameters)[: len(node.get("_args_") or ())])


def _refuse_unknown(options: Iterable[str], parameters: Mapping[str, Any], target: str) -> None:
    for key in sorted(set(options) - parameters.keys()):
        close_names = difflib.get_close_matches(key, parameters, 1)
        hint = f"did you mean {close_names[0]}? It" if close_names else "it"
        raise UserError(f"{target} has no option {key!r}: {hint} has {', '.join(parameters)}.")


def _refuse_null_numbers(
    node: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], target: str
) -> None:
    for key in node.keys() & parameters.keys():
        annotation = str(parameters[key].annotation)
        if node[key] is None and NUMBER.search(annotation) and not MAY_BE_NONE.search(annotation):
            raise UserError(f"{key}=null: give a number, as {target} takes no null.")


def _instantiate(
    node: Mapping[str, Any], arguments: dict[str, Any], parameters: Mapping[str, Any]
) -> Any:
    """Call the target with the node's options and the arguments, or return the node's partial."""
    from hydra.errors import InstantiationException

    try:
        convert = node.get("_convert_", "all")
        partial = instantiate(dict(node), _partial_=True, _convert_=convert)
        partial = _with_tuples(partial, parameters)
        if node.get("_partial_"):
            return partial
        return partial(**arguments)
    except InstantiationException as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(" ".join(str(error).split())) from error
    except TypeError as error:
        # Only a call with the wrong arguments is the fault of the config.
        if re.match(r"[\w.]+\(\) (got an unexpected|missing)", str(error)):
            names = ", ".join(parameters)
            sentence = f"{node['_target_']} cannot be made: {error}; it has {names}."
            raise UserError(sentence) from error
        raise


def _with_tuples(partial: Any, parameters: Mapping[str, inspect.Parameter]) -> Any:
    """Return the partial with tuples where its target expects them: a yaml has only lists."""
    named = [*zip(parameters, partial.args, strict=False)]
    args = [_to_tuple_if_expected(value, parameters[name]) for name, value in named]
    keywords = {
        name: _to_tuple_if_expected(value, parameters.get(name))
        for name, value in partial.keywords.items()
    }
    return functools.partial(partial.func, *args, *partial.args[len(args) :], **keywords)


def _to_tuple_if_expected(value: Any, parameter: inspect.Parameter | None) -> Any:
    """Return a list as a tuple if the default or the annotation of the parameter is a tuple."""
    if parameter is None or not isinstance(value, list):
        return value
    annotation = str(parameter.annotation)
    expects_tuple = isinstance(parameter.default, tuple) or TUPLE_ANNOTATION.match(annotation)
    return tuple(value) if expects_tuple else value
