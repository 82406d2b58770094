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
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name in origins:
        return has_method(origins[name], method)
    if name not in classes:
        return False

    methods = [getattr(node, "name", None) for node in classes[name].body]
    if method in methods:
        return True
    for base in classes[name].bases:
        first, _, rest = ast.unparse(base).partition(".")
        origin = origins.get(first, f"{module}.{first}")
        if has_method(f"{origin}.{rest}".rstrip("."), method):
            return True
    return False


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
