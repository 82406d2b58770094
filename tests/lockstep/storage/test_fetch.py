"""Checkpoints and whole runs fetched from a store: verified, cached, continued, passed over."""

import hashlib
import json

import pytest

from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, write_record
from lockstep.storage import fetch as fetch_module
from lockstep.storage.bucket import open_store
from lockstep.storage.checkpoint_files import fault_of, read_sidecar
from lockstep.storage.fetch import fetch_object, fetch_run, resolve_checkpoint
from lockstep.storage.object_store import Content, StoreError
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.small_files import SmallFiles
from memory_store import MemoryStore
from object_store import shared_store

MIB = 2**20


@pytest.fixture
def store(monkeypatch):
    """What s3://… means in these tests."""
    store = MemoryStore()
    monkeypatch.setattr(MemoryStore, "root", "s3://bucket/")
    monkeypatch.setattr(fetch_module, "open_store", lambda *_, **__: store)
    monkeypatch.setattr(fetch_module, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))
    return store


@pytest.fixture
def run(store):
    run = RunBucket(store, "the-run")
    run.prepare()
    return run


def content(step: int, num_bytes: int = 3 * MIB) -> bytes:
    return hashlib.shake_128(str(step).encode()).digest(num_bytes)


def put(run: RunBucket, step: int, kind: str = "best") -> str:
    """A complete checkpoint with its pointer; returns its key."""
    data = content(step)
    stored = run.store.put(run.checkpoint_key(kind, step, hashlib.sha256(data).hexdigest()), data)
    run.move(kind, stored, step=step, epoch=1, metric={"val/acc": 0.5})
    return stored.key


def test_a_path_stays_a_path(tmp_path):
    assert resolve_checkpoint("logs/x.ckpt", None, tmp_path) == fetch_module.Path("logs/x.ckpt")


def test_a_runs_prefix_means_its_best(run, tmp_path):
    key = put(run, 10)
    path = resolve_checkpoint(run.uri, {}, tmp_path)
    assert path.read_bytes() == content(10)
    assert fault_of(path) is None
    known = read_sidecar(path)
    assert (known.step, known.epoch, known.metric) == (10, 1, {"val/acc": 0.5})
    assert known.s3_uri == f"s3://bucket/{key}"
    for address in (f"{run.uri}/", f"{run.uri}/best.json", known.s3_uri):
        assert resolve_checkpoint(address, {}, tmp_path) == path


def test_the_cache_is_used_again_unless_it_was_damaged(run, tmp_path, monkeypatch):
    put(run, 10)
    path = resolve_checkpoint(run.uri, {}, tmp_path)
    get = run.store.get
    with monkeypatch.context() as patched:
        patched.setattr(
            run.store, "get", lambda key, *_: get(key) if key.endswith("best.json") else pytest.fail("it is cached")
        )
        assert resolve_checkpoint(run.uri, {}, tmp_path) == path
    path.write_bytes(b"damaged")
    assert resolve_checkpoint(run.uri, {}, tmp_path).read_bytes() == content(10)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"!", lambda data: data + b"!"])
def test_an_object_cut_short_or_tampered_with_is_refused_and_its_predecessor_named(run, tmp_path, damage):
    before, key = put(run, 10), put(run, 20)
    run.store.damage(key, damage(content(20)))
    with pytest.raises(UserError, match=r"bytes in the bucket instead of|sha256 differs") as caught:
        resolve_checkpoint(run.uri, {}, tmp_path)
    assert str(caught.value).endswith(f"the best before it is s3://bucket/{before}.")
    assert not list(tmp_path.rglob("*.ckpt")) and not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize(
    ("address", "sentence"),
    [("s3://{bucket}/runs/nobody", "there is no such object"), ("s3://{bucket}/x.ckpt", "there is no such object"),
     ("s3://nowhere-at-all/x.ckpt", "no such"), ("s3:/typo", "An S3 address is"), ("s3://{bucket}/../x", "key")],
)  # fmt: skip
def test_an_address_that_leads_nowhere(s3, tmp_path, address, sentence):
    with pytest.raises(UserError, match=sentence):
        resolve_checkpoint(address.format(bucket=s3["uri"].split("/")[2]), s3, tmp_path)


@pytest.fixture
def s3(monkeypatch):
    """The config group of a bucket on a real S3 server."""
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return {"uri": f"s3://{server.new_bucket()}/runs", "endpoint_url": server.endpoint_url}


class Breaking:
    """A boto3 client whose downloads break off after `limit` bytes, `times` times."""

    def __init__(self, client, limit: int, times: int):
        self.client, self.limit, self.times, self.starts = client, limit, times, []

    def __getattr__(self, name):
        return getattr(self.client, name)

    def get_object(self, **arguments):
        answer = self.client.get_object(**arguments)
        self.starts.append(arguments.get("Range"))
        if self.times > 0:
            self.times -= 1
            answer["Body"] = _BreakingBody(answer["Body"], self.limit)
        return answer


class _BreakingBody:
    def __init__(self, body, limit: int):
        self.body, self.limit = body, limit

    def iter_chunks(self, size):
        sent = 0
        for chunk in self.body.iter_chunks(size):
            yield chunk
            sent += len(chunk)
            if sent >= self.limit:
                raise ConnectionResetError


@pytest.mark.slow
def test_a_download_from_s3_that_breaks_off_is_continued(s3, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(fetch_module, "RETRY_DELAYS_S", (0.01,))
    store = open_store(s3)
    stored = store.put("x", content(10))
    store.requests.client = Breaking(store.requests.client, MIB, times=2)
    fetch_object(store, "x", tmp_path / "x", 3 * MIB, stored.sha256)
    assert (tmp_path / "x").read_bytes() == content(10)
    assert store.requests.client.starts == [None, f"bytes={MIB}-", f"bytes={2 * MIB}-"]
    assert f"broke (ConnectionResetError); {MIB} bytes are here, going on in 0.01 s." in caplog.messages[0]


def test_a_download_of_a_killed_process_is_continued_and_a_wrong_part_is_not_believed(store, tmp_path, monkeypatch):
    stored, starts, get = store.put("x", content(10)), [], store.get
    monkeypatch.setattr(store, "get", lambda key, start, etag: starts.append(start) or get(key, start, etag))
    for part, wanted in ((content(10)[:MIB], [MIB]), (b"?" * MIB, [MIB, 0]), (b"?" * 4 * MIB, [0])):
        starts.clear()
        (tmp_path / f".x.{stored.sha256[:8]}.part").write_bytes(part)
        fetch_object(store, "x", tmp_path / "x", 3 * MIB, stored.sha256)
        assert (tmp_path / "x").read_bytes() == content(10) and starts == wanted


def test_a_download_gives_up_where_nothing_comes(store, tmp_path, monkeypatch):
    stored, tries = store.put("x", content(10)), []

    def nothing():
        tries.append(1)
        raise StoreError("unreachable", "the connection to the store broke")
        yield b""

    monkeypatch.setattr(store, "get", lambda *_: Content(stored.etag, stored.bytes, nothing()))
    with pytest.raises(StoreError, match="the connection to the store broke") as caught:
        fetch_object(store, "x", tmp_path / "x", 3 * MIB, stored.sha256)
    assert caught.value.kind == "unreachable" and len(tries) == 4


def folder_of(run: RunBucket, tmp_path, name: str = "machine") -> RunFolder:
    folder = RunFolder(tmp_path / name / run.run_id)
    folder.path.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_fresh_machine_gets_the_newest_checkpoint_the_best_and_the_small_files(run, tmp_path):
    here = folder_of(run, tmp_path, "old")
    write_record(here.record, RunRecord(run_id=run.run_id, steps=30))
    here.metrics.write_text("step,loss\n1,2\n")
    here.tensorboard.mkdir()
    (here.tensorboard / "events.out.tfevents.1").write_bytes(b"events")
    SmallFiles(run, here).send()
    put(run, 20)
    put(run, 30, "last")

    there = folder_of(run, tmp_path)
    fetched = fetch_run(run.store, there)
    assert fetched == there.checkpoints / "last-step00000030.ckpt" and fault_of(fetched) is None
    assert (there.checkpoints / "best-step00000020.ckpt").read_bytes() == content(20)
    for file in ("run.json", "metrics.csv", "tensorboard/events.out.tfevents.1"):
        assert (there.path / file).read_bytes() == (here.path / file).read_bytes()
    assert not (there.path / "generation.json").exists()


def test_a_damaged_checkpoint_is_passed_over_with_a_line_that_says_so(run, tmp_path, caplog):
    put(run, 10)
    key = put(run, 20)
    run.store.damage(key, content(20)[:-1] + b"!")
    fetched = fetch_run(run.store, folder_of(run, tmp_path))
    assert fetched.name == "best-step00000010.ckpt"
    assert any(f"Passed over s3://bucket/{key}: " in line for line in caplog.messages)


def test_what_this_machine_has_and_is_newer_stays(run, tmp_path):
    put(run, 10)
    folder = folder_of(run, tmp_path)
    fetch_run(run.store, folder)
    write_record(folder.record, RunRecord(steps=12))
    assert fetch_run(run.store, folder) is None
    assert json.loads(folder.record.read_text())["steps"] == 12


def test_a_run_that_went_on_elsewhere_brings_its_record_back(run, tmp_path):
    here, there = folder_of(run, tmp_path), folder_of(run, tmp_path, "there")
    write_record(here.record, RunRecord(steps=12))
    there.record.write_text(json.dumps({"steps": 99, "updated_at": "2999-01-01T00:00:00Z"}))
    SmallFiles(run, there).send()
    put(run, 99, "last")
    fetch_run(run.store, here)
    assert json.loads(here.record.read_text())["steps"] == 99


def test_without_the_bucket_a_run_goes_on_from_here_or_says_that_it_cannot(run, tmp_path, caplog):
    put(run, 10)
    folder = folder_of(run, tmp_path)
    run.store.fault = StoreError("unreachable", "the store cannot be reached")
    with pytest.raises(UserError, match="cannot be fetched from .* cannot be reached"):
        fetch_run(run.store, folder)
    run.store.fault = None
    fetch_run(run.store, folder)
    run.store.fault = StoreError("unreachable", "the store cannot be reached")
    assert fetch_run(run.store, folder) is None
    assert "going on with what is here" in caplog.messages[-1]
