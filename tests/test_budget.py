"""The size of the project: each release may lower a budget, and none may raise one without a reason in its commit."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def reached_from(script: str) -> set[Path]:
    """Return the project's modules that a script imports, directly or through others, at any level of their code."""
    src = ROOT / "src"
    files = {".".join(path.relative_to(src).with_suffix("").parts): path for path in src.rglob("*.py")}
    found: set[Path] = set()
    waiting = [files[script]]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            waiting += [files[name] for name in names if name in files]
    return found


BUDGETS = {
    "lines in src/": (lambda: lines("src"), 15_560),
    "lines in tests/": (lambda: lines("tests"), 15_420),
    "lines in benchmarks/": (lambda: lines("benchmarks"), 1_530),
    "modules that src/train.py reaches": (lambda: len(reached_from("train")), 70),
    "lines in README.md": (lambda: len((ROOT / "README.md").read_text().splitlines()), 80),
}


@pytest.mark.parametrize("what", BUDGETS)
def test_a_budget_is_kept(what):
    measure, most = BUDGETS[what]
    assert measure() <= most, what


def test_the_number_of_files_in_git_is_kept():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    assert len(listed.stdout.splitlines()) <= 500


def test_no_folder_of_the_machinery_is_larger_than_its_budget():
    sizes = {
        path.name: lines(f"src/lockstep/{path.name}") for path in (ROOT / "src/lockstep").iterdir() if path.is_dir()
    }
    assert {name: size for name, size in sizes.items() if size > 2_000} == {}
