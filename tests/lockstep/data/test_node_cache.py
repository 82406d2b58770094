"""Built once per node, complete or not there."""

import errno
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lockstep.data.node_cache import META, cached
from lockstep.runs.errors import NoRoom, UserError


def build_slowly(part: Path):
    with (part.parent / "builds.txt").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    (part / "data.bin").write_bytes(b"x" * 100)
    return {"built_by": os.getpid()}


def test_one_of_several_builds_and_all_get_it(tmp_path):
    """The lock belongs to an open file, so threads stand for processes. A killed build left its folder."""
    (tmp_path / ".entry.part").mkdir()
    (tmp_path / ".entry.part" / "stale.bin").write_bytes(b"old")
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: cached(tmp_path / "entry", build_slowly), range(3)))
    assert results == [{"built_by": os.getpid()}] * 3 and len((tmp_path / "builds.txt").read_text().split()) == 1
    assert sorted(path.name for path in (tmp_path / "entry").iterdir()) == ["data.bin", META]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(part):
        (part / "data.bin").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(NoRoom, match="no room on .*: give data.cache_dir=FOLDER on a larger disk"):
        cached(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written or locked .*data.cache_dir"):
        cached(tmp_path / "file" / "entry", build_slowly)
