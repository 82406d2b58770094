"""Run ids, records, and files that are whole or not there."""

import os
import subprocess

import pytest

from lockstep.runs.errors import UserError
from lockstep.runs.files import lock, locked_file, write_atomically
from lockstep.runs.folder import checked_run_id, find_run, new_run_id


@pytest.mark.parametrize("bad", ["../x", "a/b", "", ".hidden", "a..b", "x" * 101, "a\nb", "a b", "-x"])
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
