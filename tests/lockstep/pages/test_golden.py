"""Pages, pictures, sources and report data of three runs equal the files under golden/, byte for byte.

After a change that is meant: python tests/lockstep/pages/make_golden.py, and read the git diff.
"""

import json
from pathlib import Path

import pytest

from lockstep.pages.html_report import report_data
from lockstep.pages.page_set import load_entries

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.rglob("*") if path.is_file())
NOW = "2026-11-21T00:00:00Z"


def files_of(logbook: Path) -> list[str]:
    return sorted(str(path.relative_to(logbook)) for path in logbook.rglob("*") if path.is_file())


def test_the_same_files_are_there(logbook):
    assert len(NAMES) > 10
    assert files_of(logbook) == [name for name in NAMES if name != "report-data.json"]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "report-data.json"])
def test_file_equals_golden(logbook, name):
    assert (logbook / name).read_text() == (GOLDEN / name).read_text()


def test_report_data_equals_golden(logbook):
    entries = load_entries(logbook, NOW)
    data = json.loads(json.dumps(report_data(entries, [entry.title for entry in entries])))
    assert data == json.loads((GOLDEN / "report-data.json").read_text())
