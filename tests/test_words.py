"""The language of docstrings: they start with a verb or a noun, and use the field's terms."""

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"
FILES = [str(path.relative_to(SRC)) for path in sorted(SRC.rglob("*.py"))]
# Question words and prepositions begin half a sentence, a bracket or small letter a formula
START = re.compile(
    r"(Of|What|Whose|Where|Who|Whether|How|Why|Which|When|If|At|In|With|For|By|On|To|Is|Are|As|Also|Args:|Raises:|"
    r"Now|Deterministic:)\b|[^A-Z\"'`]"
)
# Private words of version 1
PRIVATE = re.compile(
    r"\b(strangers?|poisoners?|whereabouts|beats|verdict|parting|floors?|let go of|letting go|"
    r"leave out|stands in for|own and theirs|from outside|what was typed)\b"
)


def docstrings(name: str) -> list[tuple[str, str]]:
    """Return the docstrings of a file, each with what it documents."""
    nodes = ast.walk(ast.parse((SRC / name).read_text()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [(getattr(node, "name", "module"), ast.get_docstring(node)) for node in nodes if isinstance(node, kinds)]
    return [(of, text) for of, text in found if text]


@pytest.mark.parametrize("name", FILES)
def test_docstrings_start_with_a_verb_or_a_noun(name):
    assert [(of, text.splitlines()[0]) for of, text in docstrings(name) if START.match(text)] == []


@pytest.mark.parametrize("name", FILES)
def test_docstrings_use_the_terms_of_the_field(name):
    assert [(of, found[0]) for of, text in docstrings(name) if (found := PRIVATE.search(text))] == []
