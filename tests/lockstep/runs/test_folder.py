"""Run ids, files that are whole or not there, a full disk in one sentence, and spans of time."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from lockstep.runs.config import seconds_of
from lockstep.runs.errors import NoRoom, UserError, no_room
from lockstep.runs.files import lock, locked_file, write_atomically
from lockstep.runs.folder import checked_run_id, find_run, new_run_id
from lockstep.runs.output import duration


@pytest.mark.parametrize("bad", ["../x", "", ".hidden", "a..b", "x" * 101, "a\nb"])
def test_a_run_id_cannot_leave_its_folder(bad):
    with pytest.raises(UserError, match="run_id"):
        checked_run_id(bad)


def test_new_run_ids_sort_by_time_and_differ():
    first, second = new_run_id(), new_run_id()
    assert first != second and first[:10] <= second[:10] and checked_run_id(first) == first


def test_a_failed_write_leaves_the_old_file_and_no_part(tmp_path):
    path = tmp_path / "f"
    write_atomically(path, lambda file: file.write("old"))

    def fail(file):
        file.write("new")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_unknown_run_is_answered_with_the_one_of_nearly_that_name(tmp_path):
    for age, name in enumerate(("t1", "a2", "c1", "t4")):  # their names say nothing of when
        (tmp_path / "train/runs" / name).mkdir(parents=True)
        (tmp_path / "train/runs" / name / "run.json").write_text("{}")
        os.utime(tmp_path / "train/runs" / name / "run.json", (1000 - age, 1000 - age))
    assert find_run(tmp_path, "a2").path == tmp_path / "train/runs/a2"
    with pytest.raises(UserError, match=r"did you mean c1\? the newest are c1, a2, t1\.$"):
        find_run(tmp_path, "c11")
    with pytest.raises(UserError, match=r"; the newest are c1, a2, t1\.$"):
        find_run(tmp_path, "other")


def test_a_file_is_free_after_the_block_though_a_child_has_the_handle_too(tmp_path):
    with locked_file(tmp_path / "a"), (tmp_path / "a").open("w") as second:
        child = subprocess.Popen(["sleep", "30"], close_fds=False)  # as a forked worker
        assert not lock(second, wait_s=0.1)
    try:
        with (tmp_path / "a").open("w") as third:
            assert lock(third, wait_s=0.1)
    finally:
        child.kill()
        child.wait()


def full(path: Path | None = None) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", *([str(path)] if path else []))


def test_a_full_disk_is_named_by_the_folder_of_the_file_or_else_by_the_one_that_was_written_to(tmp_path):
    assert str(no_room(full(tmp_path / "a" / "x.ckpt"), tmp_path)).startswith(f"no room on {tmp_path / 'a'}: free")
    (tmp_path / "a").mkdir()
    sentence = str(no_room(full(tmp_path / "a" / "x.ckpt"), tmp_path))
    assert sentence.startswith(f"no room on {tmp_path / 'a'} (") and " MiB free on " in sentence
    wrapped = RuntimeError("unexpected pos 64 vs 128")  # as torch.save raises for it
    wrapped.__context__ = full()
    for error in (full(), wrapped, OSError(errno.EDQUOT, "Disk quota exceeded")):
        assert str(no_room(error, tmp_path)).startswith(f"no room on {tmp_path} (")
    known = no_room(wrapped, tmp_path)
    assert isinstance(known, NoRoom) and no_room(known, Path("/elsewhere")) is known
    for other in (PermissionError(errno.EACCES, "no"), ValueError("x")):
        assert no_room(other, tmp_path) is None


@pytest.mark.parametrize(
    ("stated", "wanted"),
    [
        (0.5, 0.5), ("5400", 5400), ("90 min", 5400), ("1.5h", 5400), ("00:01:30:00", 5400), ("2:05", 125),
    ],
)  # fmt: skip
def test_seconds_of_what_is_a_time(stated, wanted):
    assert seconds_of(stated, "trainer.max_time") == wanted


@pytest.mark.parametrize("stated", [0, True, "90 weeks", "1:2:3:4:5", "", "inf"])
def test_what_is_none_is_refused(stated):
    with pytest.raises(UserError, match="trainer.max_time=.*: give days:hours:minutes:seconds as 00:01:30:00"):
        seconds_of(stated, "trainer.max_time")


def test_a_time_duration():
    assert [duration(s) for s in (0.4, 48, 252, 5400, 11220, 187261)] == [
        "0.4 s", "48 s", "4 min 12 s", "1 h 30 min", "3 h 7 min", "2 d 4 h",
    ]  # fmt: skip
