"""Find out from its source whether a class defines a method, without importing it.

The process that starts ranks imports no torch.
"""

import ast
import sys
from importlib.machinery import PathFinder
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
# The base classes of these libraries define every hook, so they do not count.
LIBRARIES = ("lightning", "pytorch_lightning", "torch")


def defines_in_source(target: str, method: str, visited: tuple[str, ...] = ()) -> bool:
    """Return whether a class or one of its bases defines a method. Bases of LIBRARIES do not count.

    Args:
        target: dotted name of the class. The answer is False if its file cannot be found.
        visited: the names that led to this one, because files may import from each other.
    """
    module, _, name = target.rpartition(".")
    file = None if target in visited else _find_file(module)
    if file is None:
        return False
    tree = _parse(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    origins = imported_names(tree, package)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return name in origins and defines_in_source(origins[name], method, (*visited, target))
    if method in (getattr(node, "name", None) for node in classes[name].body):
        return True
    bases = [_dotted_name(base, module, origins) for base in classes[name].bases]
    return any(defines_in_source(base, method, (*visited, target)) for base in bases)


def _parse(file: Path) -> ast.Module:
    """Return the syntax tree of a file.

    It is empty if the file has a syntax error: the later import reports the line.
    """
    try:
        return ast.parse(file.read_text())
    except SyntaxError:
        return ast.Module([], [])


def _dotted_name(base: ast.expr, module: str, origins: dict[str, str]) -> str:
    """Return the full name of a base class, which `module` writes as Base, file.Base or Base[…]."""
    if isinstance(base, ast.Subscript):
        base = base.value
    first, dot, rest = ast.unparse(base).partition(".")
    return origins.get(first, f"{module}.{first}") + dot + rest


def _find_file(module: str) -> Path | None:
    """Return the file of a module without importing it or its packages."""
    if module.partition(".")[0] in LIBRARIES:
        return None
    for folder in (str(SOURCE), *sys.path):
        file = _find_file_below(folder, module)
        if file is not None:
            return file
    return None


def _find_file_below(folder: str, module: str) -> Path | None:
    folders = [folder]
    spec = None
    for name in module.split("."):
        spec = PathFinder.find_spec(name, folders) if name else None
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or ())
    if spec is None or not str(spec.origin).endswith(".py"):
        return None
    return Path(str(spec.origin))


def imported_names(tree: ast.Module, package: str) -> dict[str, str]:
    """Return the dotted name that each imported name of a file stands for.

    Args:
        package: the package of the file, where its relative imports start.
    """
    origins = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            source = _imported_module(node, package)
            for alias in node.names:
                origins[alias.asname or alias.name] = f"{source}.{alias.name}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                origins[name] = alias.name if alias.asname else name
    return origins


def _imported_module(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module from which a statement imports."""
    if not node.level:
        return str(node.module)
    parents = package.split(".")
    base = parents[: len(parents) + 1 - node.level]
    return ".".join([*base, *([node.module] if node.module else [])])
