"""What is read from a bucket while its copy is not here: the same bytes, or an error by name; on a real S3 server."""

import concurrent.futures
import multiprocessing
import os
import pickle
import threading
import time
from urllib.parse import urlsplit

import pytest

from faulty_proxy import FaultyProxy
from lockstep.runs.errors import UserError
from lockstep.storage import local_copy as module
from lockstep.storage.local_copy import listed_copy
from lockstep.storage.remote_reads import AHEAD, RemoteReads, _Reader, _reader
from object_store import shared_store

OBJECTS = {f"{n}.jpg": os.urandom(size) for n, size in enumerate((0, 1, 1000, 300_000))}


class Bucket:
    def __init__(self, cache):
        self.server = shared_store()
        self.name, self.client = self.server.new_bucket(), self.server.client()
        for name, data in OBJECTS.items():
            self.client.put_object(Bucket=self.name, Key=f"p/{name}", Body=data)
        self.listed(cache, self.server.endpoint_url)

    def listed(self, cache, endpoint_url):
        self.copy = listed_copy(f"s3://{self.name}/p", {"endpoint_url": endpoint_url}, cache, {".jpg"})
        self.reads, self.etags = RemoteReads.of(self.copy), self.copy.etags()

    def part(self, name, start=0, size=None):
        size = len(OBJECTS[name]) if size is None else size
        return str(self.copy.files.absolute() / name), start, size, self.etags[name]


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.05,) * 40)
    for name, value in shared_store().environment().items():
        monkeypatch.setenv(name, value)
    return Bucket(tmp_path)


def test_a_part_is_what_the_object_holds_there_asked_for_before_or_not(bucket):
    parts = {
        ("3.jpg", start, size): bucket.part("3.jpg", start, size) for start, size in ((0, 7), (299_990, 10), (5, 0))
    }
    parts |= {(name, 0, len(data)): bucket.part(name) for name, data in OBJECTS.items()}
    for ahead in (False, True):
        if ahead:
            bucket.reads.ahead(parts.values())
        found = {key: bucket.reads.read(part) for key, part in parts.items()}
        assert found == {(name, start, size): OBJECTS[name][start : start + size] for name, start, size in parts}


def test_what_has_come_is_not_lacking(bucket):
    assert all(bucket.reads.lacks(bucket.part(name)[0]) for name in OBJECTS)
    bucket.copy.complete()
    assert not any(bucket.reads.lacks(bucket.part(name)[0]) for name in OBJECTS for _ in range(2))


def test_what_was_asked_for_and_not_read_is_dropped(bucket):
    bucket.reads.ahead([bucket.part("3.jpg")])
    bucket.reads.ahead([bucket.part("2.jpg")])
    assert [*_reader(bucket.reads, os.getpid())._coming] == [bucket.part("2.jpg")]
    assert bucket.reads.read(bucket.part("2.jpg")) == OBJECTS["2.jpg"]


def test_a_large_batch_does_not_lie_in_memory_as_a_whole(bucket, monkeypatch):
    parts, got = [bucket.part("3.jpg", start, 1000) for start in range(200)], []
    once = _Reader._once
    monkeypatch.setattr(_Reader, "_once", lambda *arguments: (got.append(1), once(*arguments))[1])
    bucket.reads.ahead(parts)
    until = time.monotonic() + 10
    while len(got) < AHEAD and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(got) == AHEAD
    assert [bucket.reads.read(part) for part in parts] == [OBJECTS["3.jpg"][n : n + 1000] for n in range(200)]
    assert len(got) == 200, "each once"


@pytest.mark.parametrize("ahead", [False, True])
def test_an_object_that_changed_or_went_is_named(ahead, bucket):
    bucket.client.put_object(Bucket=bucket.name, Key="p/2.jpg", Body=b"x" * 1000)
    bucket.client.delete_object(Bucket=bucket.name, Key="p/3.jpg")
    for name in ("2.jpg", "3.jpg"):
        if ahead:
            bucket.reads.ahead([bucket.part(name)])
        with pytest.raises(UserError, match=f"s3://{bucket.name}/p: {name} changed after it was listed: start again"):
            bucket.reads.read(bucket.part(name))


def read_all(reads, parts):
    reads.ahead(parts)
    return [reads.read(part) for part in parts]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_of_its_own_reads_with_threads_of_its_own(method, bucket):
    """As loader workers do; the parent's threads are not there after a fork."""
    parts = [bucket.part(name) for name in OBJECTS]
    assert read_all(bucket.reads, parts) == [*OBJECTS.values()]
    assert pickle.loads(pickle.dumps(bucket.reads)) == bucket.reads
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(read_all, bucket.reads, parts).result(60) == [*OBJECTS.values()]


def test_rest_leaves_no_thread_and_the_next_read_works(bucket):
    before = {*threading.enumerate()}
    bucket.reads.ahead([bucket.part("3.jpg")])
    assert {*threading.enumerate()} > before
    bucket.reads.rest()
    assert {*threading.enumerate()} <= before and bucket.reads.read(bucket.part("2.jpg")) == OBJECTS["2.jpg"]


def test_a_store_that_breaks_off_refuses_and_is_away_for_a_while_is_read_all_the_same(bucket, tmp_path):
    with FaultyProxy(urlsplit(bucket.server.endpoint_url).port) as proxy:
        bucket.listed(tmp_path / "other", proxy.endpoint_url)
        proxy.be("lossy")
        faults = threading.Timer(0.2, lambda: (proxy.be("503"), time.sleep(0.5), proxy.be("away"), time.sleep(0.5),
                                               proxy.be("lossy")))  # fmt: skip
        faults.start()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            assert read_all(bucket.reads, [bucket.part(name) for name in OBJECTS]) == [*OBJECTS.values()]
        faults.join()


def test_a_store_that_stays_away_is_an_error_that_a_restart_may_mend(bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DELAYS_S", (0.01, 0.01))
    with FaultyProxy(urlsplit(bucket.server.endpoint_url).port) as proxy:
        bucket.listed(tmp_path / "other", proxy.endpoint_url)
        proxy.be("away")
        with pytest.raises(ConnectionError, match=f"s3://{bucket.name}/p cannot be read: "):
            bucket.reads.read(bucket.part("3.jpg"))
