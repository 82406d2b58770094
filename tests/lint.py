"""What ruff does not look for: how dense code is, and which names say nothing.

`make check` runs it.

    python tests/lint.py src tests/lint.py      prints each fault as file:line and ends with exit
    code 1 if there is one

tests/test_budget.py holds the measures of the whole of src/ to their limits.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

# Branches are counted in expressions too, where ruff's C901 does not look.
BRANCHES = (
    ast.If,
    ast.For,
    ast.While,
    ast.With,
    ast.ExceptHandler,
    ast.IfExp,
    ast.BoolOp,
    ast.comprehension,
    ast.match_case,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (*FUNCTIONS, ast.ClassDef, ast.Module)
NOT_COUNTED = (ast.Load, ast.Store, ast.Del)
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)

COLUMNS = 100
MAX_BRANCHES = 10
LONGEST_COMMENT_BEHIND_CODE = 60  # characters
SKIPS = ("# fmt: " + "skip", "# fmt: " + "off")
# Names that say nothing (CONTRIBUTING.md, Words). `each` may stand in a comprehension.
EMPTY_NAMES = {
    "found",
    "own",
    "stated",
    "words",
    "known",
    "here",
    "there",
    "taken",
    "wanted",
    "given",
    "each",
}


@dataclass
class Measures:
    """Counts of one file or of several.

    Attributes:
        nodes: of the syntax tree, without Load, Store and Del.
        code_lines: without blank lines, comments and docstrings.
        most_branches: of the function with the most.
        wide: lines of more than COLUMNS columns.
        tuple_assignments: `a, b = x, y`.
    """

    nodes: int = 0
    code_lines: int = 0
    most_branches: int = 0
    wide: int = 0
    skips: int = 0
    tuple_assignments: int = 0

    def add(self, other: "Measures") -> None:
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)

    @property
    def nodes_a_line(self) -> float:
        return self.nodes / max(self.code_lines, 1)


def measure_files(paths: list[Path]) -> Measures:
    """Return the sums over files, and the most branches of any function."""
    total = Measures()
    most_branches = 0
    for path in paths:
        measures = measure(path.read_text())
        most_branches = max(most_branches, measures.most_branches)
        total.add(measures)
    total.most_branches = most_branches
    return total


def measure(text: str) -> Measures:
    """Return the counts of one file."""
    tree = ast.parse(text)
    lines = text.splitlines()
    branches = [branches_of(node) for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    return Measures(
        nodes=sum(not isinstance(node, NOT_COUNTED) for node in ast.walk(tree)),
        code_lines=len(_code_lines(text) - _docstring_lines(tree)),
        most_branches=max(branches, default=0),
        wide=sum(len(line) > COLUMNS for line in lines),
        skips=sum(text.count(skip) for skip in SKIPS),
        tuple_assignments=sum(_assigns_a_tuple(node) for node in ast.walk(tree)),
    )


def branches_of(function: ast.AST) -> int:
    return sum(isinstance(node, BRANCHES) for node in ast.walk(function))


def _assigns_a_tuple(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign):
        return False
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def _code_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return lines


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the sentence of each fault in a file."""
    tree = ast.parse(text)
    in_comprehension = _nodes_of_comprehensions(tree)
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS) and branches_of(node) > MAX_BRANCHES:
            yield node.lineno, f"{node.name} has {branches_of(node)} branches: take it apart"
        if isinstance(node, COMPREHENSIONS) and _is_tangled(node):
            yield (
                node.lineno,
                "a comprehension has one `for` and at most one `if`, and none inside: write the loop",
            )
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            yield node.lineno, "a lambda with a name is a function"
        name = _bound_name(node)
        if name in EMPTY_NAMES and not (name == "each" and node in in_comprehension):
            yield getattr(node, "lineno", 0), f"the name {name!r} says nothing: name the thing"
    yield from _long_comments(text)


def _nodes_of_comprehensions(tree: ast.AST) -> set[ast.AST]:
    nodes: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, COMPREHENSIONS):
            nodes |= set(ast.walk(node))
    return nodes


def _is_tangled(comprehension: ast.AST) -> bool:
    generators = comprehension.generators  # type: ignore[attr-defined]
    if len(generators) > 1 or len(generators[0].ifs) > 1:
        return True
    parts = [
        getattr(comprehension, name)
        for name in ("elt", "key", "value")
        if hasattr(comprehension, name)
    ]
    for part in (*parts, *generators[0].ifs):
        if any(isinstance(node, COMPREHENSIONS) for node in ast.walk(part)):
            return True
    return False


def _bound_name(node: ast.AST) -> str | None:
    """Return the name that a node gives to a variable or a parameter."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else None


def _long_comments(text: str) -> Iterator[tuple[int, str]]:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or lines[token.start[0] - 1].lstrip().startswith("#"):
            continue
        if len(token.string) > LONGEST_COMMENT_BEHIND_CODE and "noqa" not in token.string:
            yield (
                token.start[0],
                "a comment behind code is for units and values: put the sentence above",
            )


def python_files(names: list[str]) -> list[Path]:
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        paths += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return paths


def main(names: list[str]) -> int:
    code = 0
    for path in python_files(names):
        for line, sentence in faults(path.read_text()):
            print(f"{path}:{line}: {sentence}")
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
