"""Read from the source what a class can do: the process that starts ranks imports no torch."""

import ast
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]


def has_method(target: str, method: str) -> bool:
    """Return whether a class below src/, or a base of it that lies there, defines a method.

    Args:
        target: dotted name of the class. The answer for a class of another package is False.
    """
    module, _, name = target.rpartition(".")
    file = SOURCE.joinpath(*module.split(".")).with_suffix(".py")
    if not module or not file.is_file():
        return False

    tree = ast.parse(file.read_text())
    origins = imported_names(tree)
    if name in origins:
        return has_method(origins[name], method)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            if any(getattr(part, "name", None) == method for part in node.body):
                return True
            bases = [_origin(ast.unparse(base), module, origins) for base in node.bases]
            return any(has_method(base, method) for base in bases)
    return False


def _origin(base: str, module: str, origins: dict[str, str]) -> str:
    """Return the dotted name of a base, which is written as the file imports it."""
    first, _, rest = base.partition(".")
    return f"{origins.get(first, f'{module}.{first}')}.{rest}".rstrip(".")


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the dotted name that each imported name of a file stands for."""
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                origins[name] = alias.name if alias.asname else name
    return origins
