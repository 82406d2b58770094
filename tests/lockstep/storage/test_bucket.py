"""Verified puts, compare-and-swap, sweeps; against a real S3 server."""

import hashlib
import threading

import pytest

from lockstep.storage.bucket import Bucket
from lockstep.storage.s3 import S3Options, StoreError
from object_store import shared_store

MIB = 2**20


@pytest.fixture(scope="module")
def bucket_name():
    return shared_store().new_bucket()


@pytest.fixture
def bucket(monkeypatch, bucket_name):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return Bucket(S3Options(f"s3://{bucket_name}", server.endpoint_url), part_bytes=5 * MIB)


def a_file(path, num_bytes: int, seed: int = 0):
    path.write_bytes(hashlib.shake_128(str(seed).encode()).digest(num_bytes))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * MIB, 5 * MIB + 1, 17 * MIB])
def test_a_file_arrives_whole_in_one_put_or_in_parts(bucket, tmp_path, num_bytes):
    path, sha256 = a_file(tmp_path / "f", num_bytes)
    stored = bucket.put_file(path, "k/f", sha256=sha256)
    assert (stored.key, stored.bytes, stored.sha256) == ("k/f", num_bytes, sha256)
    assert bucket.sha256_of("k/f") == sha256
    assert bucket.head("k/f")["Metadata"]["sha256"] == sha256
    assert bucket.abort_unfinished("k/") == 0


def test_a_file_that_was_damaged_here_is_not_uploaded(bucket, tmp_path):
    path, sha256 = a_file(tmp_path / "f", 6 * MIB)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreError, match="damaged on this machine") as caught:
        bucket.put_file(path, "damaged", sha256=sha256)
    assert caught.value.kind == "local"
    assert not list(bucket.keys("damaged")) and bucket.abort_unfinished("damaged") == 0


class Altered:
    """A client whose bytes are changed on the way: the checksum that was sent must not fit."""

    def __init__(self, client, method: str):
        self.client, self.method = client, method

    def __getattr__(self, name):
        call = getattr(self.client, name)
        if name != self.method:
            return call
        return lambda **arguments: call(**{**arguments, "Body": b"?" + arguments["Body"][1:]})


@pytest.mark.parametrize(("method", "num_bytes"), [("put_object", 1000), ("upload_part", 6 * MIB)])
def test_bytes_changed_on_the_way_are_refused(bucket, tmp_path, method, num_bytes):
    path, sha256 = a_file(tmp_path / "f", num_bytes)
    bucket.client = Altered(bucket.client, method)
    with pytest.raises(StoreError, match="did not arrive as they were sent"):
        bucket.put_file(path, "changed", sha256=sha256)
    assert not list(bucket.keys("changed")) and bucket.abort_unfinished("changed") == 0


class Forgetful:
    """A store that keeps other bytes than it acknowledged, or no checksums."""

    def __init__(self, client, **head):
        self.client, self.changes = client, head

    def __getattr__(self, name):
        return getattr(self.client, name)

    def head_object(self, **arguments):
        answer = self.client.head_object(**arguments)
        answer.update(self.changes)
        return {key: value for key, value in answer.items() if value is not None}


@pytest.mark.parametrize(
    ("num_bytes", "change"),
    [(1000, {"ContentLength": 999}), (1000, {"ChecksumSHA256": "AAAA"}), (6 * MIB, {"ChecksumCRC32": "AAAA-2"})],
)
def test_what_is_read_back_must_fit(bucket, tmp_path, num_bytes, change):
    path, sha256 = a_file(tmp_path / "f", num_bytes)
    bucket.client = Forgetful(bucket.client, **change)
    with pytest.raises(StoreError, match="did not arrive whole"):
        bucket.put_file(path, "readback", sha256=sha256)


@pytest.mark.parametrize(("stored", "times"), [({}, 0), ({"ChecksumCRC32": None}, 1), ({"ChecksumCRC32": "AAAA"}, 1)])
def test_a_store_without_our_checksums_is_read_back_in_full(bucket, tmp_path, monkeypatch, stored, times):
    path, sha256 = a_file(tmp_path / "f", 6 * MIB)
    read, real = [], Bucket.sha256_of
    monkeypatch.setattr(Bucket, "sha256_of", lambda self, key: read.append(key) or real(self, key))
    bucket.client = Forgetful(bucket.client, **stored)
    assert bucket.put_file(path, "plain", sha256=sha256).sha256 == sha256
    assert read == ["plain"] * times


def test_a_growing_file_is_sent_as_it_was(bucket, tmp_path):
    path, _ = a_file(tmp_path / "f", 6 * MIB)
    before = path.read_bytes()

    def grow() -> bool:
        with path.open("ab") as file:
            file.write(b"more")
        return False

    assert bucket.put_file(path, "growing", cancelled=grow).bytes == len(before)
    assert bucket.sha256_of("growing") == hashlib.sha256(before).hexdigest()


def test_cancel_leaves_nothing(bucket, tmp_path):
    path, _ = a_file(tmp_path / "f", 16 * MIB)
    answers = iter([False, False, True])
    with pytest.raises(StoreError) as caught:
        bucket.put_file(path, "cancelled", cancelled=lambda: next(answers))
    assert caught.value.kind == "aborted"
    assert bucket.abort_unfinished("cancelled") == 0


def test_the_sweep_takes_only_its_prefix(bucket):
    for key in ("run/a", "run/b/c", "run2/a"):
        bucket.client.create_multipart_upload(Bucket=bucket.options.bucket, Key=key)
    assert bucket.abort_unfinished("run/") == 2
    assert bucket.abort_unfinished("run/") == 0
    assert bucket.abort_unfinished("run2/") == 1


def test_swap_only_from_what_was_read(bucket):
    assert bucket.read_small("pointer") == (None, None)
    bucket.swap("pointer", b"one", None)
    data, etag = bucket.read_small("pointer")
    assert data == b"one"
    bucket.swap("pointer", b"two", etag)
    for stale in (None, etag):
        with pytest.raises(StoreError) as caught:
            bucket.swap("pointer", b"three", stale)
        assert caught.value.kind == "conflict"
    assert bucket.read_small("pointer")[0] == b"two"


def test_swap_whose_answer_was_lost_is_no_defeat(bucket):
    """boto3 sends the request again, and the store says that somebody was there first: it was ourselves."""
    bucket.swap("lost", b"mine", None)
    bucket.swap("lost", b"mine", None)


def test_one_of_many_writers_wins(bucket):
    for round_ in range(5):
        etag = bucket.read_small("race")[1]
        won: list[int] = []

        def write(number, etag=etag, round_=round_, won=won):
            try:
                bucket.swap("race", f"{round_}-{number}".encode(), etag)
                won.append(number)
            except StoreError as error:
                assert error.kind == "conflict"

        threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert bucket.read_small("race")[0] == f"{round_}-{won[0]}".encode()


class Unconditional:
    """A store that ignores If-Match and If-None-Match, as some that speak S3 do."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)

    def put_object(self, **arguments):
        return self.client.put_object(**{k: v for k, v in arguments.items() if k not in ("IfMatch", "IfNoneMatch")})


def test_a_store_without_conditional_writes_is_found_out(bucket):
    bucket.client = Unconditional(bucket.client)
    bucket.probe("p/")
    assert not bucket.conditional
    bucket.swap("unconditional", b"one", None)
    with pytest.raises(StoreError):
        bucket.swap("unconditional", b"two", None)


def test_encryption_and_storage_class_are_asked_for(bucket, tmp_path):
    asked = {}

    class Spy(Forgetful):
        def put_object(self, **arguments):
            asked.update(arguments)
            return self.client.put_object(**arguments)

    options = S3Options(bucket.options.uri, bucket.options.endpoint_url, "STANDARD_IA", "AES256")
    Bucket(options, Spy(bucket.client)).put_bytes("encrypted", b"x")
    assert (asked["StorageClass"], asked["ServerSideEncryption"]) == ("STANDARD_IA", "AES256")
    assert bucket.head("encrypted")["ServerSideEncryption"] == "AES256"


def test_a_file_that_is_not_there(bucket, tmp_path):
    with pytest.raises(StoreError, match="a file on this machine cannot be used") as caught:
        bucket.put_file(tmp_path / "nothing", "x")
    assert caught.value.kind == "local"
