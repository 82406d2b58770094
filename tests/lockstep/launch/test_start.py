"""One process trains a run, and a run that has finished is left alone by whoever starts it again."""

import multiprocessing
import time
from pathlib import Path

import pytest

from lockstep.launch.start import hold_run_lock
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from runs import run_door

SMALL = ["experiment=quickstart", "trainer.max_steps=2", "run_id=r", "test=false"]


def hold(path, held) -> None:
    kept = hold_run_lock(RunFolder(path))
    held.set()
    time.sleep(60)
    del kept


def test_a_second_process_neither_trains_nor_harms_a_run(tmp_path, capsys):
    held = multiprocessing.get_context("spawn").Event()
    first = multiprocessing.get_context("spawn").Process(target=hold, args=(tmp_path / "r", held))
    first.start()
    try:
        assert held.wait(60)
        with pytest.raises(UserError, match="r is still trained by another process"):
            hold_run_lock(RunFolder(tmp_path / "r"), wait_s=0.6)
        assert "waiting for it to end" in capsys.readouterr().out
    finally:
        first.kill()
        first.join()
    hold_run_lock(RunFolder(tmp_path / "r"), wait_s=5).close()  # the lock went with the process


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_from_outside_ends_at_once(tmp_path):
    assert run_door("train", *SMALL, logs=tmp_path).code == 0
    again = run_door("train", *SMALL, "resume=auto", logs=tmp_path)
    assert again.code == 0 and "The run r has finished." in again.output, again.output
    assert again.record["restarts"] == [] and again.record["steps"] == 2
    longer = run_door("train", *SMALL, "resume=auto", "trainer.max_steps=3", logs=tmp_path)
    assert longer.code == 0 and longer.record["steps"] == 3 and len(longer.record["restarts"]) == 1


def test_a_log_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "r", Path("/proc/logs/r")):
        with pytest.raises(UserError, match=f"{place} cannot be written .*paths.log_dir="):
            hold_run_lock(RunFolder(place))
