"""Parameters of what a `_target_` names, read from its source: a wrong key is found without an import of torch."""

import ast
import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Signature:
    """
    Args:
        names: of its parameters, those of its bases behind its own.
        any_name: it takes any other name too.
    """

    names: tuple[str, ...]
    any_name: bool


def signature_of(target: str) -> Signature | None:
    """The parameters of a class or function by its dotted name; None where its source does not tell."""
    module, _, name = target.rpartition(".")
    found = _find(module, name)
    return _of_definition(*found) if found else None


def _of_definition(module: str, definition: Definition) -> Signature | None:
    if isinstance(definition, ast.FunctionDef):
        return _of_arguments(definition.args)
    own = next((node for node in definition.body if _is_init(node)), None)
    if own is None and definition.decorator_list:  # a dataclass, say
        return None
    mine = _of_arguments(own.args, skip=1) if isinstance(own, ast.FunctionDef) else Signature((), True)
    if not mine.any_name:
        return mine
    bases = [_of_base(module, base) for base in definition.bases]
    if own is None and not bases:
        return Signature((), False)
    if None in bases:
        return Signature(mine.names, True) if own else None
    known = [base for base in bases if base]
    names = (*mine.names, *(name for base in known for name in base.names))
    return Signature(tuple(dict.fromkeys(names)), not known or any(base.any_name for base in known))


def _is_init(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name == "__init__"


def _of_arguments(arguments: ast.arguments, skip: int = 0) -> Signature:
    plain = [*arguments.posonlyargs, *arguments.args][skip:] + arguments.kwonlyargs
    return Signature(tuple(argument.arg for argument in plain), arguments.kwarg is not None)


def _of_base(module: str, base: ast.expr) -> Signature | None:
    found = _find(module, ast.unparse(base)) if isinstance(base, ast.Name | ast.Attribute) else None
    return _of_definition(*found) if found else None


def _find(module: str, name: str) -> tuple[str, Definition] | None:
    """(the module that defines it, its definition), through whatever imports it."""
    first, _, rest = name.partition(".")
    tree = _tree(module)
    for node in _statements(tree) if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == first:
                    place = ".".join(filter(None, [_source(module, node), alias.name, rest]))
                    return _find(*place.rpartition(".")[::2])
    return None


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Of the file's top, and of what it defines under `if` and `try`."""
    for node in tree.body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from node.body


def _source(module: str, node: ast.Import | ast.ImportFrom) -> str:
    """The module that an import statement of `module` names."""
    if isinstance(node, ast.Import):
        return ""
    path = _path(module)
    package = module.split(".") if path and path.name == "__init__.py" else module.split(".")[:-1]
    parents = package[: len(package) - node.level + 1] if node.level else []
    return ".".join([*parents, *filter(None, [node.module])])


def _path(module: str) -> Path | None:
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None or not spec.has_location:  # frozen, or in C
        return None
    if not inner:
        return Path(spec.origin)
    place = Path(spec.origin).parent.joinpath(*inner)
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


@functools.cache
def _tree(module: str) -> ast.Module | None:
    path = _path(module) if module else None
    return ast.parse(path.read_bytes()) if path else None
