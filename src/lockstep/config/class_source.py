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
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    origins = imported_names(tree) | {key: f"{module}.{key}" for key in classes}
    if name not in classes:
        # The file may import the class.
        return name in origins and has_method(origins[name], method)

    if any(getattr(node, "name", None) == method for node in classes[name].body):
        return True
    for base in classes[name].bases:
        first, _, rest = ast.unparse(base).partition(".")
        origin = f"{origins.get(first, first)}.{rest}".rstrip(".")
        if origin != target and has_method(origin, method):
            return True
    return False


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the dotted name of what each name imported at the top of a file stands for."""
    origins = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    origins[alias.asname] = alias.name
    return origins
