"""What old runs hold is listed and freed: never of a run that lives, never the best of a kept one."""

import os

import pytest

from lockstep.runs.files import lock, utc_now
from lockstep.runs.folder import RunFolder
from lockstep.runs.prune import cache_of, holdings, listing
from lockstep.runs.record import RunRecord, write_record


@pytest.fixture
def make(tmp_path):
    def make_run(name, **fields):
        folder = RunFolder(tmp_path / name)
        folder.checkpoints.mkdir(parents=True)
        for kind in ("best", "last"):
            (folder.checkpoints / f"{kind}-step00000001.ckpt").write_bytes(b"x" * 1000)
        folder.tensorboard.mkdir()
        (folder.tensorboard / "events").write_bytes(b"x" * 10)
        (folder.path / "metrics.csv").write_text("step")
        write_record(folder.record, RunRecord(**{"status": "finished", **fields}))
        return folder

    return make_run


def names(folder):
    return sorted(path.name for path in folder.path.rglob("*") if path.is_file())


def test_all_but_the_record_and_the_curves_goes(make):
    folder = make("a")
    [held] = holdings([folder.path], kept=())
    assert (held.num_bytes("checkpoints"), held.num_bytes("tensorboard"), held.status) == (2000, 10, "finished")
    assert held.free() == 2010 and names(folder) == ["metrics.csv", "run.json"]
    assert holdings([folder.path], kept=()) == []


def test_the_best_of_a_kept_run_stays_unless_asked(make):
    folder = make("a")
    [held] = holdings([folder.path], kept=["a"])
    assert held.is_kept and held.free() == 1010
    assert names(folder) == ["best-step00000001.ckpt", "metrics.csv", "run.json"]
    [held] = holdings([folder.path], kept=["a"], with_best=True)
    assert held.free() == 1000 and names(folder) == ["metrics.csv", "run.json"]


def test_a_second_name_of_what_stays_frees_nothing(make):
    folder = make("a")
    last = folder.checkpoints / "last-step00000001.ckpt"
    last.unlink()
    os.link(folder.checkpoints / "best-step00000001.ckpt", last)
    assert holdings([folder.path], kept=["a"])[0].num_bytes("checkpoints") == 0
    assert holdings([folder.path], kept=())[0].num_bytes("checkpoints") == 1000


def test_a_run_that_lives_is_left_alone(make):
    running = make("running", status="running", phase="training", updated_at=utc_now())
    held = make("held")
    with held.alive.open("a") as handle:
        assert lock(handle, wait_s=0)
        assert holdings([running.path, held.path], kept=()) == []
    assert [found.name for found in holdings([running.path, held.path], kept=())] == ["held"]


def test_a_run_whose_record_is_damaged_is_left_alone(make):
    folder = make("a")
    folder.record.write_text("{")
    assert holdings([folder.path], kept=()) == []


def test_fetched_checkpoints_are_a_cache(tmp_path):
    assert cache_of(tmp_path) == []
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "best.ckpt").write_bytes(b"x" * 500)
    [held] = cache_of(tmp_path)
    assert held.free() == 500 and cache_of(tmp_path) == []


def test_the_listing_has_a_line_a_run_and_a_sum(make):
    lines = listing(holdings([make("a").path, make("b").path], kept=["b"])).splitlines()
    assert [line.split()[0] for line in lines] == ["run", "a", "b", "in"] and len(set(map(len, lines))) == 1
    assert lines[2].startswith("b (kept: all but its best)  finished") and listing([]) == ""
