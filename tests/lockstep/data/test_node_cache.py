"""Built once per node, complete or not there."""

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.data.node_cache import META, cached, read_meta
from lockstep.runs.errors import NoRoom, UserError


def build_slowly(part: Path):
    with (part.parent / "builds.txt").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    (part / "data.bin").write_bytes(b"x" * 100)
    return {"built_by": os.getpid()}


def test_one_of_several_builds_and_all_get_it(tmp_path):
    """The lock belongs to an open file, so threads stand for processes."""
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: cached(tmp_path / "entry", build_slowly), range(3)))
    assert len((tmp_path / "builds.txt").read_text().split()) == 1
    assert results[0] == results[1] == results[2]
    assert (tmp_path / "entry" / "data.bin").read_bytes() == b"x" * 100


@pytest.mark.parametrize("error", [RuntimeError("boom"), UserError("bad file"), KeyboardInterrupt()])
def test_a_build_that_fails_leaves_nothing(tmp_path, error):
    def build(part):
        (part / "data.bin").write_bytes(b"half")
        raise error

    with pytest.raises(type(error)):
        cached(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_what_a_killed_build_left_is_replaced(tmp_path):
    (tmp_path / ".entry.part").mkdir()
    (tmp_path / ".entry.part" / "stale.bin").write_bytes(b"old")
    assert cached(tmp_path / "entry", build_slowly)["built_by"] == os.getpid()
    assert sorted(path.name for path in (tmp_path / "entry").iterdir()) == ["data.bin", META]


def test_a_torn_file_is_built_anew(tmp_path):
    cached(tmp_path / "entry", build_slowly)
    (tmp_path / "entry" / "data.bin").write_bytes(b"x" * 99)
    assert read_meta(tmp_path / "entry") is None
    cached(tmp_path / "entry", build_slowly)
    assert (tmp_path / "entry" / "data.bin").stat().st_size == 100
    (tmp_path / "entry" / META).write_text(json.dumps([1]))
    assert read_meta(tmp_path / "entry") is None


def test_no_space_left(tmp_path):
    def build(part):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(NoRoom, match=f"no room on {tmp_path} .*: give data.cache_dir=FOLDER on a larger disk"):
        cached(tmp_path / "entry", build)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written or locked .*data.cache_dir"):
        cached(tmp_path / "file" / "entry", build_slowly)
