"""The page of a real run, and that a logbook which cannot be written leaves the exit code alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from example_runs import write_run
from runs import run_door

SRC = Path(__file__).resolve().parents[1] / "src"
SMALL = ("experiment=quickstart", "trainer.max_steps=2", "test=false", "run_id=r")


def rows(logbook: Path) -> list[str]:
    lines = (logbook / "README.md").read_text().split("## All runs")[1].split("\n")
    return [line for line in lines if "](" in line]


def test_a_real_run_writes_its_page_and_takes_in_the_lost(tmp_path):
    write_run(tmp_path / "train" / "runs", "dead", status="running", updated_at="2026-11-20T20:16:00Z")
    done = run_door("train", *SMALL, logs=tmp_path)
    assert done.code == 0, done.output
    mine, dead = rows(tmp_path / "logbook")
    assert "[r](quickstart.md#run-r) | ✅ finished |" in mine and "[dead](vit_ddp.md#run-dead) | ❔ lost |" in dead
    page = (tmp_path / "logbook" / "quickstart.md").read_text()
    assert "# quickstart\n" in page and "trainer.max_steps=2" in page and "figures/r.svg" in page
    assert (tmp_path / "logbook" / "figures" / "r.svg").exists()


def no_page() -> None:
    import lockstep.pages.build

    def refuse(*_):
        raise MemoryError("no page today")

    lockstep.pages.build.record_run = refuse


def test_a_failing_logbook_is_said_and_the_lost_have_their_rows_since_the_start(tmp_path):
    write_run(tmp_path / "train" / "runs", "dead", status="running", updated_at="2026-11-20T20:16:00Z")
    done = run_door("train", *SMALL, logs=tmp_path, before=no_page)
    assert done.code == 0, done.output
    assert "The logbook page was not written (MemoryError: no page today); make logbook tries again." in done.output
    (dead,) = rows(tmp_path / "logbook")
    assert "[dead]" in dead and "❔ lost" in dead


CONCLUDE = """
import sys
from pathlib import Path
from lockstep.launch.finish import conclude
from lockstep.runs.folder import RunFolder
conclude(RunFolder(Path(sys.argv[1])), Path(sys.argv[2]), 0)
sys.exit(7)
"""


@pytest.mark.parametrize("record", ["whole", "broken", "none"])
@pytest.mark.parametrize("screen", ["read", "closed"])
def test_whatever_fails_after_a_run_leaves_its_exit_code(tmp_path, record, screen):
    folder = write_run(tmp_path, "run-1")
    if record == "broken":
        (folder / "run.json").write_text('{"status": ')
    if record == "none":
        (folder / "run.json").unlink()
    read, write = os.pipe()
    if screen == "closed":
        os.close(read)
    arguments = [sys.executable, "-c", CONCLUDE, str(folder), str(tmp_path / "logbook")]
    done = subprocess.run(arguments, cwd=SRC, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (7, "")
    assert (tmp_path / "logbook" / "README.md").exists() == (record == "whole")
