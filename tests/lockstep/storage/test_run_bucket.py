"""Generations, pointers, and what may be deleted; against a real S3 server."""

import json
import threading

import pytest

from lockstep.runs.errors import UserError
from lockstep.storage.bucket import Bucket
from lockstep.storage.run_bucket import RunBucket, Superseded, parse_pointer, run_root
from lockstep.storage.s3 import S3Options, StoreError
from object_store import shared_store

SHA = "ab" * 32


@pytest.fixture(scope="module")
def bucket_name():
    return shared_store().new_bucket()


@pytest.fixture
def bucket(monkeypatch, bucket_name):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return Bucket(S3Options(f"s3://{bucket_name}/prefix", server.endpoint_url))


_number = iter(range(1000))


@pytest.fixture
def start(bucket):
    """start() → one more start of the same run, prepared."""
    run_id = f"run-{next(_number)}"

    def begin() -> RunBucket:
        run = RunBucket(bucket, "prefix", run_id)
        run.prepare()
        return run

    return begin


def entry(run: RunBucket, step: int, kind: str = "best") -> dict:
    """A complete object and what a pointer to it says."""
    data = f"{run.generation} {step}".encode()
    stored = run.bucket.put_bytes(run.checkpoint_key(kind, step, f"{step:08x}" + SHA), data)
    facts = {"key": stored.key, "bytes": stored.bytes, "sha256": stored.sha256}
    return {**facts, "epoch": step // 10, "step": step, "metric": {"val/acc": step / 100}}


def keys(run: RunBucket) -> list[str]:
    return sorted(key.removeprefix(f"{run.root}checkpoints/") for key, _ in run.bucket.keys(f"{run.root}checkpoints/"))


@pytest.mark.parametrize("run_id", ["../x", "a/b", "", ".hidden", "a..b", "x" * 101, "a\nb"])
def test_a_run_id_cannot_leave_the_prefix(run_id):
    with pytest.raises(UserError):
        run_root("prefix", run_id)


def test_the_pointer_says_what_was_asked_for(start):
    run = start()
    run.move("best", entry(run, 10))
    said = json.loads(run.bucket.read_small(f"{run.root}best.json")[0])
    assert {"key", "bytes", "sha256", "epoch", "metric", "run_id", "generation"} <= said.keys()
    assert said["key"] == f"prefix/{run.run_id}/checkpoints/best-step00000010-g0001-0000000a.ckpt"
    assert (said["epoch"], said["metric"], said["run_id"], said["generation"]) == (1, {"val/acc": 0.1}, run.run_id, 1)


def test_the_named_object_and_its_predecessor_stay_and_older_ones_go(start):
    run = start()
    for step in (10, 20, 30, 40):
        run.move("best", entry(run, step))
    assert keys(run) == ["best-step00000030-g0001-0000001e.ckpt", "best-step00000040-g0001-00000028.ckpt"]
    assert [pointer.step for pointer in run.pointers("best")] == [40, 30]


def test_best_does_not_delete_last_nor_what_another_rank_uploads_now(start):
    run = start()
    run.move("last", entry(run, 5, "last"))
    later = run.checkpoint_folder("best", 30) + "shard-00002-model.safetensors"
    run.bucket.put_bytes(later, b"x")
    run.move("best", entry(run, 10))
    run.move("best", entry(run, 20))
    assert keys(run) == [
        "best-step00000010-g0001-0000000a.ckpt", "best-step00000020-g0001-00000014.ckpt",
        "best-step00000030-g0001/shard-00002-model.safetensors", "last-step00000005-g0001-00000005.ckpt",
    ]  # fmt: skip


def test_an_older_start_moves_nothing(start):
    old = start()
    old.move("best", entry(old, 10))
    late = entry(old, 99)
    new = start()
    assert new.generation == 2
    with pytest.raises(Superseded, match="number 2"):
        old.move("best", late)
    assert new.read_pointer("best")[0].step == 10


def test_an_older_start_moves_nothing_where_there_was_no_pointer_yet(start):
    old = start()
    start()
    with pytest.raises(Superseded):
        old.move("best", entry(old, 10))
    assert old.read_pointer("best") == (None, None)


def test_an_older_start_that_was_about_to_write_loses(start, bucket):
    """The race itself: the old process has passed every check, and only its write is left."""
    old = start()
    old.move("best", entry(old, 10))
    late, swap = entry(old, 99), bucket.swap

    def swap_late(key, data, etag):
        bucket.swap = swap
        start()
        swap(key, data, etag)

    bucket.swap = swap_late
    with pytest.raises(Superseded):
        old.move("best", late)
    pointer = old.read_pointer("best")[0]
    assert (pointer.generation, pointer.step) == (2, 10)


def test_many_races_of_an_old_start_against_a_new_one(start):
    for _ in range(6):
        old = start()
        old.move("best", entry(old, 10))
        threads = [threading.Thread(target=_move_on, args=(run_of,)) for run_of in (lambda old=old: old, start)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pointer = old.read_pointer("best")[0]
        assert pointer.generation == old.generation + 1, pointer
        assert old.bucket.head(pointer.key)["ContentLength"] == pointer.bytes


def _move_on(run_of) -> None:
    run = run_of()
    for step in (20, 30, 40):
        try:
            run.move("best", entry(run, step))
        except Superseded:
            return


def test_two_starts_at_once_get_two_generations(start):
    runs = []
    threads = [threading.Thread(target=lambda: runs.append(start())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.generation for run in runs) == [1, 2, 3]


def test_a_start_sweeps_unfinished_uploads_and_orphans_of_its_run_only(start, bucket):
    old = start()
    old.move("best", entry(old, 10))
    orphan = entry(old, 20)["key"]
    bucket.client.create_multipart_upload(Bucket=bucket.options.bucket, Key=f"{old.root}checkpoints/best-x")
    bucket.client.create_multipart_upload(Bucket=bucket.options.bucket, Key=f"{old.root[:-1]}0/checkpoints/best-x")
    new = start()
    assert orphan.rpartition("/")[2] not in keys(new) and len(keys(new)) == 1
    assert bucket.abort_unfinished(new.root) == 0
    assert bucket.abort_unfinished(f"{old.root[:-1]}0/") == 1


def test_other_ranks_join_the_start_of_rank_zero(bucket):
    first = RunBucket(bucket, "prefix", "joined", "start-1")
    other = RunBucket(bucket, "prefix", "joined", "start-1")
    assert not other.join()
    first.prepare()
    assert other.join() and other.generation == 1
    assert not RunBucket(bucket, "prefix", "joined", "start-2").join()


def test_only_forward(start):
    run = start()
    run.move("best", entry(run, 20))
    assert run.move("best", entry(run, 10), only_forward=True).step == 20
    assert run.move("best", entry(run, 10)).step == 10, "a start that went on from an earlier step may go back"


def test_a_metric_that_is_no_number_is_left_out(start):
    run = start()
    assert run.move("best", {**entry(run, 10), "metric": {"val/acc": float("nan")}}).metric == {}


def test_a_pointer_that_was_tampered_with_is_written_anew(start):
    run = start()
    run.bucket.put_bytes(f"{run.root}best.json", b"{]")
    run.move("best", entry(run, 10))
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
def test_a_file_name_cannot_leave_the_run(bucket, name):
    with pytest.raises(StoreError):
        RunBucket(bucket, "prefix", "r").file_key(name)
