"""The language of docstrings, messages, pages and option comments: the terms of the field, no
private words.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
LONGEST_NAME = 10  # words behind test_
FILES = [str(path.relative_to(SRC)) for path in sorted(SRC.rglob("*.py"))]
# Question words and prepositions begin half a sentence, a bracket or small letter a formula
START = re.compile(
    r"(Of|What|Whose|Where|Who|Whether|How|Why|Which|When|If|At|In|With|For|By|On|To|Is|Are|As|Also|Args:|Raises:|"
    r"Now|Deterministic:)\b|[^A-Z\"'`]"
)
# Private words of version 1
PRIVATE = re.compile(
    r"\b(strangers?|poisoners?|whereabouts|verdict|parting|floors?|let go of|letting go|"
    r"leave out|stands in for|own and theirs|from outside|what was typed|of one's own|goes on with)\b"
)


def docstrings(name: str) -> list[tuple[str, str]]:
    """Return the docstrings of a file, each with what it documents."""
    nodes = ast.walk(ast.parse((SRC / name).read_text()))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (getattr(node, "name", "module"), ast.get_docstring(node))
        for node in nodes
        if isinstance(node, kinds)
    ]
    return [(of, text) for of, text in found if text]


def test_docstrings_use_the_terms_of_the_field():
    every = [(name, of, text) for name in FILES for of, text in docstrings(name)]
    wrong = [
        (name, of, text) for name, of, text in every if START.match(text) or PRIVATE.search(text)
    ]
    assert wrong == []


def test_messages_and_pages_use_the_terms_of_the_field():
    root = SRC.parent
    paths = [
        *root.glob("*.md"),
        *root.glob("docs/*.md"),
        *root.glob("configs/**/*.yaml"),
        *root.glob("launch/**/*.md"),
    ]
    texts = {
        str(path.relative_to(root)): path.read_text() for path in paths if path.name != "options.md"
    }
    for name in FILES:
        nodes = ast.walk(ast.parse((SRC / name).read_text()))
        texts[name] = "\n".join(
            n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)
        )
    found = {name: [match[0] for match in PRIVATE.finditer(text)] for name, text in texts.items()}
    assert {name: words for name, words in found.items() if words} == {}


def test_names_of_tests_have_at_most_ten_words():
    long = []
    for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("nullgpu/tests/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "name", None) or ""
            words = name.removeprefix("test_").split("_")
            if name.startswith("test_") and len(words) > LONGEST_NAME:
                long.append(f"{path.relative_to(ROOT)}::{name}")
    assert long == []
