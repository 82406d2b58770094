"""The logbook of this repository: every record can be read, its page is that of its record, no link leads nowhere."""

import re
import shutil
from pathlib import Path

import pytest

from lockstep.logbook.build import write_index, write_page
from lockstep.logbook.folders import read_run
from lockstep.logbook.report import report_html

LOGBOOK = Path(__file__).resolve().parents[1] / "logbook"
FOLDERS = sorted(path.parent for path in LOGBOOK.glob("*/run.json"))


def test_there_are_runs_and_not_too_many():
    assert 10 <= len(FOLDERS) <= 18


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_page_of_every_run_is_that_of_its_record(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.logbook.folders.REPOSITORY", tmp_path)
    copy = shutil.copytree(folder, tmp_path / "logbook" / folder.name)
    text = write_page(read_run(copy)).read_text()
    assert text == (folder / "page.md").read_text()
    assert (copy / "curves.svg").exists() == (folder / "curves.svg").exists()


def test_the_index_is_that_of_the_runs(tmp_path):
    copy = shutil.copytree(LOGBOOK, tmp_path / "logbook")
    write_index(copy)
    assert (copy / "README.md").read_text() == (LOGBOOK / "README.md").read_text()


def test_the_report_takes_all_of_them():
    assert len(report_html("all", [read_run(folder) for folder in FOLDERS])) > 200_000


@pytest.mark.parametrize("page", sorted(LOGBOOK.rglob("*.md")), ids=lambda page: str(page.relative_to(LOGBOOK)))
def test_every_link_leads_somewhere(page):
    text = re.sub(r"^(`{3,}).*?^\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^()\s]+)\)", text):
        assert re.match(r"[a-z]+:", target) or (page.parent / target.partition("#")[0]).exists(), target
