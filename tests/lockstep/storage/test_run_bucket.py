"""Generations, pointers, and what may be deleted; on a store in memory, the races on a real S3 server too."""

import json
import threading

import pytest

from lockstep.runs.errors import UserError
from lockstep.storage.bucket import read_small
from lockstep.storage.object_store import StoreError
from lockstep.storage.pointer import parse_pointer
from lockstep.storage.run_bucket import RunBucket, Superseded, run_root
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_options import S3Options
from memory_store import MemoryStore
from object_store import shared_store

SHA = "ab" * 32


@pytest.fixture
def store():
    return MemoryStore("prefix/")


@pytest.fixture
def s3(monkeypatch):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return S3Store(S3Options(f"s3://{server.new_bucket()}/prefix", server.endpoint_url))


_number = iter(range(1000))


def starter(store):
    """start() → one more start of the same run, prepared."""
    run_id = f"run-{next(_number)}"

    def begin() -> RunBucket:
        run = RunBucket(store, run_id)
        run.prepare()
        return run

    return begin


@pytest.fixture
def start(store):
    return starter(store)


def move(run: RunBucket, step: int, kind: str = "best", stored=None, **options):
    """Point to a complete object of that step, which is put there unless it is `stored`."""
    metric = {"val/acc": step / 100}
    return run.move(kind, stored or put(run, step, kind), step=step, epoch=step // 10, metric=metric, **options)


def put(run: RunBucket, step: int, kind: str = "best"):
    return run.store.put(run.checkpoint_key(kind, step, f"{step:08x}" + SHA), f"{run.generation} {step}".encode())


def keys(run: RunBucket) -> list[str]:
    return sorted(key.removeprefix(f"{run.root}checkpoints/") for key, _ in run.store.list(f"{run.root}checkpoints/"))


@pytest.mark.parametrize("run_id", ["../x", "a/b", "", ".hidden", "a..b", "x" * 101, "a\nb"])
def test_a_run_id_cannot_leave_the_prefix(run_id):
    with pytest.raises(UserError):
        run_root("prefix", run_id)


def test_the_pointer_says_what_was_asked_for(start):
    run = start()
    move(run, 10)
    said = json.loads(read_small(run.store, f"{run.root}best.json")[0])
    assert {"key", "bytes", "sha256", "epoch", "metric", "run_id", "generation"} <= said.keys()
    assert said["key"] == f"prefix/{run.run_id}/checkpoints/best-step00000010-g0001-0000000a.ckpt"
    assert (said["epoch"], said["metric"], said["run_id"], said["generation"]) == (1, {"val/acc": 0.1}, run.run_id, 1)


def test_the_named_object_and_its_predecessor_stay_and_older_ones_go(start):
    run = start()
    for step in (10, 20, 30, 40):
        move(run, step)
    assert keys(run) == ["best-step00000030-g0001-0000001e.ckpt", "best-step00000040-g0001-00000028.ckpt"]
    assert [pointer.step for pointer in run.pointers("best")] == [40, 30]


def test_best_does_not_delete_last_nor_what_another_rank_uploads_now(start):
    run = start()
    move(run, 5, "last")
    later = run.checkpoint_folder("best", 30) + "shard-00002-model.safetensors"
    run.store.put(later, b"x")
    move(run, 10)
    move(run, 20)
    assert keys(run) == [
        "best-step00000010-g0001-0000000a.ckpt", "best-step00000020-g0001-00000014.ckpt",
        "best-step00000030-g0001/shard-00002-model.safetensors", "last-step00000005-g0001-00000005.ckpt",
    ]  # fmt: skip


def test_an_older_start_moves_nothing(start):
    old = start()
    move(old, 10)
    late = put(old, 99)
    new = start()
    assert new.generation == 2
    with pytest.raises(Superseded, match="number 2"):
        move(old, 99, stored=late)
    assert new.read_pointer("best")[0].step == 10


def test_an_older_start_moves_nothing_where_there_was_no_pointer_yet(start):
    old = start()
    start()
    with pytest.raises(Superseded):
        move(old, 10)
    assert old.read_pointer("best") == (None, None)


def test_an_older_start_that_was_about_to_write_loses(start, store):
    """The race itself: the old process has passed every check, and only its write is left."""
    old = start()
    move(old, 10)
    late, swap = put(old, 99), store.swap

    def swap_late(key, data, etag):
        store.swap = swap
        start()
        swap(key, data, etag)

    store.swap = swap_late
    with pytest.raises(Superseded):
        move(old, 99, stored=late)
    pointer = old.read_pointer("best")[0]
    assert (pointer.generation, pointer.step) == (2, 10)


def test_many_races_of_an_old_start_against_a_new_one(s3):
    start = starter(s3)
    for _ in range(6):
        old = start()
        move(old, 10)
        threads = [threading.Thread(target=_move_on, args=(run_of,)) for run_of in (lambda old=old: old, start)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pointer = old.read_pointer("best")[0]
        assert pointer.generation == old.generation + 1, pointer
        assert old.store.head(pointer.key).bytes == pointer.bytes


def _move_on(run_of) -> None:
    run = run_of()
    for step in (20, 30, 40):
        try:
            move(run, step)
        except Superseded:
            return


@pytest.mark.parametrize("kind", ["store", "s3"])
def test_two_starts_at_once_get_two_generations(kind, request):
    runs, start = [], starter(request.getfixturevalue(kind))
    threads = [threading.Thread(target=lambda: runs.append(start())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.generation for run in runs) == [1, 2, 3]


def test_a_start_sweeps_unfinished_uploads_and_orphans_of_its_run_only(s3):
    start = starter(s3)
    old = start()
    move(old, 10)
    orphan = put(old, 20).key
    for root in (old.root, f"{old.root[:-1]}0/"):
        s3.requests.call("create_multipart_upload", Key=f"{root}checkpoints/best-x")
    new = start()
    assert orphan.rpartition("/")[2] not in keys(new) and len(keys(new)) == 1
    assert [key for key, _ in s3.parts.unfinished("")] == [f"{old.root[:-1]}0/checkpoints/best-x"]


def test_a_start_that_was_superseded_sweeps_nothing_of_the_newer_one(start, store):
    old = start()
    start()
    store.swept.clear()
    late = RunBucket(store, old.run_id)
    late.generation = old.generation
    with pytest.raises(Superseded, match="number 2"):
        late.prepare()
    assert store.swept == []


def test_other_ranks_join_the_start_of_rank_zero(store):
    first, other = (RunBucket(store, "joined", "start-1") for _ in range(2))
    assert not other.join()
    first.prepare()
    assert other.join() and other.generation == 1
    assert not RunBucket(store, "joined", "start-2").join()


def test_only_forward(start):
    run = start()
    move(run, 20)
    assert move(run, 10, only_forward=True).step == 20
    assert move(run, 10).step == 10, "a start that went on from an earlier step may go back"


def test_a_metric_that_is_no_number_is_left_out(start):
    run = start()
    run.move("best", put(run, 10), step=10, metric={"val/acc": float("nan"), "val/loss": 1.5})
    assert run.read_pointer("best")[0].metric == {"val/loss": 1.5}


def test_a_pointer_that_was_tampered_with_is_written_anew(start):
    run = start()
    run.store.put(f"{run.root}best.json", b"{]")
    move(run, 10)
    assert run.read_pointer("best")[0].step == 10


GOOD = {"key": "p/r/checkpoints/best-step00000010-g0001-abababab.ckpt", "bytes": 1, "sha256": SHA, "epoch": 0,
        "step": 10, "metric": {}, "run_id": "r", "generation": 1}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [{"key": "p/other/checkpoints/best-step00000010-g0001.ckpt"}, {"key": "p/r/checkpoints/../best-step1-g1.ckpt"},
     {"key": "p/r/checkpoints/best-step1-g1/../../x"}, {"sha256": "../x"}, {"bytes": -1}, {"bytes": "many"},
     {"metric": 3}, {"key": None}, {"epoch": float("inf")}],
)  # fmt: skip
def test_a_pointer_that_this_run_could_not_have_written_is_refused(change):
    assert parse_pointer(json.dumps(GOOD).encode(), "p/r/").step == 10
    with pytest.raises(StoreError):
        parse_pointer(json.dumps({**GOOD, **change}).encode(), "p/r/")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff", b"{" * 5000, b"[" * 100_000])
def test_nonsense_is_no_pointer(data):
    with pytest.raises(StoreError):
        parse_pointer(data, "p/r/")


@pytest.mark.parametrize("name", ["../x", "a/../b", ".hidden", "a//b", "a\nb"])
def test_a_file_name_cannot_leave_the_run(store, name):
    with pytest.raises(StoreError):
        RunBucket(store, "r").file_key(name)


def test_a_pointer_that_an_older_version_wrote_is_read_and_moved_on(start):
    run = start()
    stored, before = put(run, 20), put(run, 10)
    held = {"epoch": 1, "step": 20, "metric": {"val/acc": 0.5}, "run_id": run.run_id, "generation": 1,
            "written_at": "2026-11-21T10:30:12Z", "write_id": "0123456789abcdef"}  # fmt: skip
    named = {"key": before.key, "bytes": before.bytes, "sha256": before.sha256}
    previous = {**held, **named, "step": 10, "previous": None}
    held = {**held, "key": stored.key, "bytes": stored.bytes, "sha256": stored.sha256, "previous": previous}
    run.store.put(f"{run.root}best.json", json.dumps(held).encode())
    assert [(found.step, found.key) for found in run.pointers("best")] == [(20, stored.key), (10, before.key)]
    move(run, 30)
    said = json.loads(read_small(run.store, f"{run.root}best.json")[0])
    assert {*held} == {*said} and said["previous"]["step"] == 20 and said["previous"]["previous"] is None
