"""The page in a run's own folder."""

import os
import shutil

from example_runs import write_run
from lockstep.pages.run_page import shows_record, write_run_page
from lockstep.runs.folder import RunFolder


def test_a_page_shows_its_run_with_the_pictures_beside_it(tmp_path):
    folder = write_run(tmp_path, "run-1")
    page = write_run_page(folder)
    text = page.read_text()
    assert page == folder / "page.md" and "## run-1" in text and "**86.43" in text
    for name in ("curves.svg", "confusion_matrix.svg"):
        assert f"({name})" in text and (folder / name).read_text().startswith("<svg")
    assert "figures/" not in text and "README.md" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["run-1"]


def test_a_page_knows_which_record_it_shows_whatever_the_clock_says(tmp_path):
    folder = write_run(tmp_path, "run-1", status="running")
    assert not shows_record(RunFolder(folder))
    page = write_run_page(folder)
    assert shows_record(RunFolder(folder))
    newer = write_run(tmp_path / "newer", "run-1", status="failed")
    shutil.copy(newer / "run.json", folder / "run.json")
    os.utime(folder / "run.json", (1, 1))
    assert not shows_record(RunFolder(folder)) and page.stat().st_mtime > 1
    write_run_page(folder)
    assert shows_record(RunFolder(folder)) and "failed" in page.read_text()


def test_a_run_that_logged_nothing_has_a_page_without_pictures(tmp_path):
    folder = write_run(tmp_path, "run-1", status="failed", error={"message": "out of memory", "rank": 0})
    for name in ("metrics.csv", "hardware-node0.csv"):
        (folder / name).unlink()
    text = write_run_page(folder).read_text()
    assert "rank 0" in text and "](curves.svg)" not in text and not (folder / "curves.svg").exists()
