"""The logbook of this repository: its pages are those of its runs, and no link leads nowhere."""

import re
from pathlib import Path

import pytest

from logbook import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("logbook/**/*.md"), ROOT / "README.md"])
NOTES = ROOT / "logbook" / "notes"


def links(text: str) -> list[str]:
    """Targets of markdown links and pictures, and of src and href; code shows links, it has none."""
    text = re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)
    found = re.findall(r"\]\(([^()\s]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]+)"', text)
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def headings(text: str) -> set[str]:
    """Anchors of a page: explicit ones, and those that GitHub makes of headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return made | set(re.findall(r'id="([^"]+)"', text))


def test_the_pages_are_those_of_the_runs(tmp_path, capsys):
    assert main(["--logbook", str(ROOT / "logbook"), "--logs", str(tmp_path), "build", "--check"]) == 0
    assert capsys.readouterr().out == f"{ROOT / 'logbook'}: up to date\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    text = page.read_text()
    seen_from = ROOT / "logbook" if NOTES in page.parents else page.parent  # a note stands inside a page
    for target in links(text):
        name, _, anchor = target.partition("#")
        path = (seen_from / name) if name else page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in headings(path.read_text()), target


def test_links_are_found_where_they_are():
    text = '[a](b.md#c) ![p](figures/x.svg) <img src="y.svg"> `[no](none.md)`\n```sh\n[no](z.md)\n```\n[w](https://e.org/x)'
    assert links(text) == ["b.md#c", "figures/x.svg", "y.svg"]
    assert headings('# A (b), c\n<a id="run-1"></a>\n') == {"a-b-c", "run-1"}
    assert len(PAGES) > 20
