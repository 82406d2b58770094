"""The measures of the code: each is a hint for a reader, and none gets worse without a reason in
its commit.
"""

import ast
import functools
import subprocess
from pathlib import Path

import pytest

from lint import Measures, measure_files

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"


@functools.cache
def source() -> Measures:
    return measure_files(sorted(SRC.rglob("*.py")))


def reached_from(script: str) -> set[Path]:
    """Return the project's modules that a script imports, directly or through others, at any level
    of their code.
    """
    files = {
        ".".join(path.relative_to(SRC).with_suffix("").parts): path for path in SRC.rglob("*.py")
    }
    reached: set[Path] = set()
    waiting = [files[script]]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            waiting += [files[name] for name in names if name in files]
    return reached


# What is measured, and at most.
LIMITS = {
    "syntax nodes of src/": (lambda: source().nodes, 168_000),
    "nodes a line of code": (lambda: round(source().nodes_a_line, 2), 6.3),
    "branches of one function": (lambda: source().most_branches, 10),
    "lines over 100 columns": (lambda: source().wide, 0),
    "fmt: skip": (lambda: source().skips, 2),
    "tuple assignments in 1,000 lines": (
        lambda: 1000 * source().tuple_assignments / source().code_lines,
        1,
    ),
    "modules that src/train.py reaches": (lambda: len(reached_from("train")), 124),
    "lines in README.md": (lambda: len((ROOT / "README.md").read_text().splitlines()), 80),
}


@pytest.mark.parametrize("what", LIMITS)
def test_a_measure_keeps_its_limit(what):
    measured, most = LIMITS[what]
    assert measured() <= most, what


def test_the_number_of_files_in_git_is_kept():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git repository")
    # The logbook has a limit of its own, of runs.
    files = [name for name in listed.stdout.splitlines() if not name.startswith("logbook/")]
    assert len(files) <= 632
