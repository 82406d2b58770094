"""docs/check_figures.py: one digit that is changed anywhere is found, and no true figure is blamed."""

import random
import re
import shutil
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.append(str(REPOSITORY / "docs"))

import check_figures  # noqa: E402

FOLDERS = ("logbook", "benchmarks/results", "configs", "docs", "nullgpu")


@pytest.fixture
def copy(tmp_path):
    """The documents and their sources."""
    ignore = shutil.ignore_patterns("__pycache__", "pictures")
    for folder in FOLDERS:
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=ignore)
    for path in [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("benchmarks/*.md")]:
        shutil.copy(path, tmp_path / path.relative_to(REPOSITORY))
    return tmp_path


def with_another_digit(text: str, figures: list[re.Match], draw: random.Random) -> str:
    figure = draw.choice(figures)
    place = draw.choice([figure.start() + at for at, sign in enumerate(figure.group()) if sign.isdigit()])
    other = draw.choice(sorted(set("0123456789") - {text[place]}))
    return text[:place] + other + text[place + 1 :]


def generated(root: Path) -> list[Path]:
    pages = [*root.glob("logbook/**/*.md"), *root.glob("benchmarks/*.md"), root / "docs/options.md"]
    return [page for page in pages if page.parent.name != "notes" and check_figures.FIGURE.search(page.read_text())]


@pytest.mark.slow
def test_another_digit_on_any_page_that_a_script_writes(copy):
    draw, changed = random.Random(0), 0
    while changed < 80:
        true = {page: page.read_text() for page in generated(copy)}
        assert check_figures.pages_that_differ(copy) == [] and len(true) > 20
        for page, text in true.items():
            page.write_text(with_another_digit(text, [*check_figures.FIGURE.finditer(text)], draw))
        assert sorted(check_figures.pages_that_differ(copy)) == sorted(str(page.relative_to(copy)) for page in true)
        for page, text in true.items():
            page.write_text(text)
        changed += len(true)


def test_another_digit_in_a_text_by_hand(copy):
    draw, changed = random.Random(0), 0
    for document in check_figures.by_hand(copy):
        text = (copy / document).read_text()
        assert [*check_figures.unbound(copy, document, text)] == [], document
        plain = re.sub(r"```.*?```|`[^`\n]*`", lambda code: " " * len(code.group()), text, flags=re.DOTALL)
        named = check_figures.pages_named(copy, document, text)
        for figure in check_figures.FIGURE.finditer(plain):
            if document.endswith(".yaml") and text[text.rfind("\n", 0, figure.start()) + 1] != "#":
                continue
            for _ in range(2):
                other = with_another_digit(text, [figure], draw)
                now = other[figure.start() : figure.end()]
                if any(check_figures.has(page.read_text().replace("\xa0", " "), now) for page in named):
                    continue  # another figure of a page that it names, not found
                assert [*check_figures.unbound(copy, document, other)] != [], figure
                changed += 1
    assert changed > 20


def test_a_figure_is_found_on_the_page_that_its_paragraph_names_alone(copy):
    text = "It reached 90.68 % ([its page](logbook/cifar10_speedrun.md)).\n\nAnd 90.68 % here, `90.1 %` in code."
    assert [*check_figures.unbound(copy, "README.md", text)] == ["90.68 %"]
    assert [*check_figures.unbound(copy, "README.md", "0.68 % (logbook/cifar10_speedrun.md)")] == ["0.68 %"]
