"""S3Store: verified puts, compare-and-swap, sweeps; against a real S3 server."""

import hashlib
import threading

import pytest

from lockstep.storage.bucket import read_small, sha256_of_object
from lockstep.storage.object_store import StoreError
from lockstep.storage.s3 import S3Store, web_host
from lockstep.storage.s3_client import S3Requests
from lockstep.storage.s3_options import S3Options
from object_store import shared_store

MIB = 2**20


@pytest.fixture(scope="module")
def bucket_name():
    return shared_store().new_bucket()


@pytest.fixture
def store(monkeypatch, bucket_name):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return S3Store(S3Options(f"s3://{bucket_name}", server.endpoint_url), part_bytes=5 * MIB)


def a_file(path, num_bytes: int, seed: int = 0):
    path.write_bytes(hashlib.shake_128(str(seed).encode()).digest(num_bytes))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def num_unfinished(store, prefix: str) -> int:
    return len(list(store.parts.unfinished(prefix)))


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * MIB, 5 * MIB + 1, 17 * MIB])
def test_a_file_arrives_whole_in_one_put_or_in_parts(store, tmp_path, num_bytes):
    path, sha256 = a_file(tmp_path / "f", num_bytes)
    stored = store.put("k/f", path, sha256=sha256)
    assert (stored.key, stored.bytes, stored.sha256) == ("k/f", num_bytes, sha256)
    assert sha256_of_object(store, "k/f") == sha256
    assert store.head("k/f") == stored and stored.etag
    assert num_unfinished(store, "k/") == 0


def test_a_file_that_was_damaged_here_is_not_uploaded(store, tmp_path):
    path, sha256 = a_file(tmp_path / "f", 6 * MIB)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(StoreError, match="damaged on this machine") as caught:
        store.put("damaged", path, sha256=sha256)
    assert caught.value.kind == "local"
    assert not list(store.list("damaged")) and num_unfinished(store, "damaged") == 0


class Client:
    """boto3's, but for what a subclass changes."""

    def __init__(self, client):
        self.client = client

    def __getattr__(self, name):
        return getattr(self.client, name)


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
def test_bytes_changed_on_the_way_are_refused(store, tmp_path, method, num_bytes):
    path, sha256 = a_file(tmp_path / "f", num_bytes)
    store.requests.client = Altered(store.requests.client, method)
    with pytest.raises(StoreError, match="did not arrive as they were sent"):
        store.put("changed", path, sha256=sha256)
    assert not list(store.list("changed")) and num_unfinished(store, "changed") == 0


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
def test_what_is_read_back_must_fit(store, tmp_path, num_bytes, change):
    path, sha256 = a_file(tmp_path / "f", num_bytes)
    store.requests.client = Forgetful(store.requests.client, **change)
    with pytest.raises(StoreError, match="did not arrive whole"):
        store.put("readback", path, sha256=sha256)


@pytest.mark.parametrize(("stored", "times"), [({}, 0), ({"ChecksumCRC32": None}, 1), ({"ChecksumCRC32": "AAAA"}, 1)])
def test_a_store_without_our_checksums_is_read_back_in_full(store, tmp_path, monkeypatch, stored, times):
    path, sha256 = a_file(tmp_path / "f", 6 * MIB)
    read, real = [], S3Store._read_back
    monkeypatch.setattr(S3Store, "_read_back", lambda self, key: read.append(key) or real(self, key))
    store.requests.client = Forgetful(store.requests.client, **stored)
    assert store.put("plain", path, sha256=sha256).sha256 == sha256
    assert read == ["plain"] * times


def test_a_growing_file_is_sent_as_it_was(store, tmp_path):
    path, _ = a_file(tmp_path / "f", 6 * MIB)
    before = path.read_bytes()

    def grow() -> bool:
        with path.open("ab") as file:
            file.write(b"more")
        return False

    assert store.put("growing", path, cancelled=grow).bytes == len(before)
    assert sha256_of_object(store, "growing") == hashlib.sha256(before).hexdigest()


def test_cancel_leaves_nothing(store, tmp_path):
    path, _ = a_file(tmp_path / "f", 16 * MIB)
    answers = iter([False, False, True])
    with pytest.raises(StoreError) as caught:
        store.put("cancelled", path, cancelled=lambda: next(answers))
    assert caught.value.kind == "aborted"
    assert num_unfinished(store, "cancelled") == 0


def test_the_sweep_takes_only_its_prefix_and_no_object(store):
    for key in ("run/a", "run/b/c", "run2/a"):
        store.requests.call("create_multipart_upload", Key=key)
    store.put("run/whole", b"x")
    store.delete("run/", only_unfinished=True)
    assert (num_unfinished(store, "run/"), num_unfinished(store, "run2/")) == (0, 1)
    assert store.head("run/whole").bytes == 1
    store.delete("run2/", only_unfinished=True)


class Unlisted(Client):
    """A role that may not list unfinished uploads."""

    def list_multipart_uploads(self, **arguments):
        from botocore.exceptions import ClientError

        raise ClientError({"Error": {"Code": "AccessDenied"}}, "ListMultipartUploads")


def test_a_role_that_may_not_sweep_is_no_error(store):
    store.requests.client = Unlisted(store.requests.client)
    store.delete("run/", only_unfinished=True)


def test_what_could_not_be_ended_is_ended_at_the_next_put(store, tmp_path, monkeypatch):
    path, _ = a_file(tmp_path / "f", 6 * MIB)
    call, away = S3Requests.call, {"abort_multipart_upload", "complete_multipart_upload"}

    def broken(self, method, **arguments):
        if method in away:
            raise StoreError("unreachable", "the store cannot be reached")
        return call(self, method, **arguments)

    monkeypatch.setattr(S3Requests, "call", broken)
    with pytest.raises(StoreError, match="cannot be reached"):
        store.put("interrupted", path)
    assert num_unfinished(store, "interrupted") == 1
    away.clear()
    store.put("another", b"x")
    assert num_unfinished(store, "interrupted") == 0


def test_swap_only_from_what_was_read(store):
    assert read_small(store, "pointer") == (None, None)
    store.swap("pointer", b"one", None)
    data, etag = read_small(store, "pointer")
    assert data == b"one"
    store.swap("pointer", b"two", etag)
    for stale in (None, etag):
        with pytest.raises(StoreError) as caught:
            store.swap("pointer", b"three", stale)
        assert caught.value.kind == "conflict"
    assert read_small(store, "pointer")[0] == b"two"


def test_swap_whose_answer_was_lost_is_no_defeat(store):
    """boto3 sends the request again, and the store says that somebody was there first: it was ourselves."""
    store.swap("lost", b"mine", None)
    store.swap("lost", b"mine", None)


@pytest.mark.slow
def test_one_of_many_writers_wins(store):
    for round_ in range(5):
        etag = read_small(store, "race")[1]
        won: list[int] = []

        def write(number, etag=etag, round_=round_, won=won):
            try:
                store.swap("race", f"{round_}-{number}".encode(), etag)
                won.append(number)
            except StoreError as error:
                assert error.kind == "conflict"

        threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1
        assert read_small(store, "race")[0] == f"{round_}-{won[0]}".encode()


class Unconditional(Client):
    """A store that ignores If-Match and If-None-Match, as some that speak S3 do."""

    def put_object(self, **arguments):
        return self.client.put_object(**{k: v for k, v in arguments.items() if k not in ("IfMatch", "IfNoneMatch")})


def test_a_store_without_conditional_writes_is_found_out(store):
    store.requests.client = Unconditional(store.requests.client)
    assert store.probe("p/") is False
    store.swap("unconditional", b"one", None)
    with pytest.raises(StoreError):
        store.swap("unconditional", b"two", None)


def test_encryption_and_storage_class_are_asked_for(store, tmp_path):
    asked = {}

    class Spy(Forgetful):
        def put_object(self, **arguments):
            asked.update(arguments)
            return self.client.put_object(**arguments)

    options = S3Options(store.options.uri, store.options.endpoint_url, "STANDARD_IA", "AES256")
    S3Store(options, Spy(store.requests.client)).put("encrypted", b"x")
    assert (asked["StorageClass"], asked["ServerSideEncryption"]) == ("STANDARD_IA", "AES256")
    assert store.requests.call("head_object", Key="encrypted")["ServerSideEncryption"] == "AES256"


def test_a_file_that_is_not_there(store, tmp_path):
    with pytest.raises(StoreError, match="a file on this machine cannot be used") as caught:
        store.put("x", tmp_path / "nothing")
    assert caught.value.kind == "local"


def test_a_page_says_what_it_is_and_where_a_browser_finds_it(store):
    store.put("p/page.html", b"<p>", content_type="text/html; charset=utf-8")
    head = store.requests.call("head_object", Key="p/page.html")
    assert (head["ContentType"], head["CacheControl"]) == ("text/html; charset=utf-8", "no-cache")
    assert store.web_root == f"{store.options.endpoint_url}/{store.options.bucket}/"


def test_where_a_browser_finds_a_bucket():
    assert web_host("https://s3.eu-west-1.amazonaws.com", "b") == "https://b.s3.amazonaws.com"
    assert web_host("https://s3.amazonaws.com", "a.b") == "https://s3.amazonaws.com/a.b"
    assert web_host("https://minio.example:9000/", "b") == "https://minio.example:9000/b"  # of AWS_ENDPOINT_URL_S3


def test_objects_are_listed_in_the_order_of_their_keys_and_read_from_an_offset(store):
    for key in ("list/b", "list/a", "other/a"):
        store.put(key, key.encode())
    assert list(store.list("list/")) == [("list/a", 6), ("list/b", 6)]
    content = store.get("list/a", start=5)
    assert (content.num_bytes, b"".join(content.blocks)) == (1, b"a")
    with pytest.raises(StoreError) as caught:
        store.get("list/a", etag='"another"')
    assert caught.value.kind == "conflict"
    store.delete("list/a")
    store.delete("list/a")
    assert list(store.list("list/")) == [("list/b", 6)]
