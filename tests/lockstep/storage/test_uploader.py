"""The background thread and its outbox: order, replacement, retries, flush; one real S3 server that dies."""

import hashlib
import os
import threading
import time

import pytest

from lockstep.runs.folder import RunFolder
from lockstep.storage import uploader as uploader_module
from lockstep.storage.bucket import read_small, sha256_of_object
from lockstep.storage.checkpoint_files import Sidecar
from lockstep.storage.object_store import StoredObject, StoreError
from lockstep.storage.outbox import Outbox
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_client import S3Requests
from lockstep.storage.s3_options import S3Options
from lockstep.storage.uploader import Uploader
from memory_store import MemoryStore
from object_store import object_store

MIB = 2**20


class Setting:
    """A run folder and its place in a store."""

    def __init__(self, tmp_path, store):
        self.store, self.folder = store, RunFolder(tmp_path / "the-run")
        self.folder.checkpoints.mkdir(parents=True)
        self.uploaders: list[Uploader] = []

    def bucket_run(self) -> RunBucket:
        return RunBucket(self.store, self.folder.run_id)

    def uploader(self, **settings) -> Uploader:
        made = Uploader(self.bucket_run(), self.folder, **{"retry_delays_s": (0.1, 0.2), **settings})
        self.uploaders.append(made)
        return made

    def checkpoint(self, step: int, kind: str = "best", num_bytes: int = 1000, seed: int = 0):
        data = hashlib.shake_128(f"{step}{seed}".encode()).digest(num_bytes)
        path = self.folder.checkpoints / f"{kind}-step{step:08d}.ckpt"
        path.write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        return kind, path, Sidecar(step, num_bytes, sha256, metric={"val/acc": 0.5})


@pytest.fixture
def setting(tmp_path):
    made = Setting(tmp_path, MemoryStore())
    yield made
    for uploader in made.uploaders:
        uploader.stop()


@pytest.fixture
def said(caplog):
    return caplog


def named(setting, kind: str = "best"):
    return setting.bucket_run().read_pointer(kind)[0]


def test_a_best_arrives_though_training_deletes_it_at_once(setting):
    uploader = setting.uploader()
    uploader.start()
    kind, path, sidecar = setting.checkpoint(10, num_bytes=12 * MIB)
    uploader.offer(kind, path, sidecar)
    path.unlink()
    assert uploader.flush(20)
    pointer = named(setting)
    assert (pointer.step, pointer.sha256) == (10, sidecar.sha256)
    assert sha256_of_object(uploader.run.store, pointer.key) == sidecar.sha256
    status = uploader.status()
    assert status.uri == f"memory://bucket/{pointer.key}"
    assert (status.sha256, status.step, status.error, status.left) == (sidecar.sha256, 10, None, ())
    assert status.seconds >= 0
    assert not list(setting.folder.path.glob("upload/rank*")), "the outbox is empty again"


def test_offering_costs_a_link_and_no_copy(setting):
    uploader = setting.uploader()
    kind, path, sidecar = setting.checkpoint(10)
    uploader.offer(kind, path, sidecar)
    waiting = next(setting.folder.path.glob("upload/rank00000-best-step00000010/*.ckpt"))
    assert os.path.samefile(waiting, path)


def test_a_newer_best_replaces_the_one_that_waits(setting):
    uploader = setting.uploader()
    for step in (10, 20, 30):
        uploader.offer(*setting.checkpoint(step))
    assert [item.step for item in Outbox(setting.folder.path / "upload").left()] == [30]
    uploader.start()
    assert uploader.flush(20)
    assert named(setting).step == 30 and named(setting).previous is None


def test_best_goes_before_last_and_an_urgent_last_before_all(setting, monkeypatch):
    sent = []
    monkeypatch.setattr(Uploader, "_send", lambda self, item: sent.append(item.kind) or StoredObject("k", 0, "s"))
    for urgent, order in ((False, ["best", "last", "files"]), (True, ["last", "best", "files"])):
        sent.clear()
        uploader = setting.uploader(last_interval_s=0.0)
        if urgent:
            uploader.hurry()
        uploader.offer(*setting.checkpoint(10, "last", seed=1))
        uploader.offer(*setting.checkpoint(10, "best"))
        uploader.start()
        assert uploader.flush(5)
        assert list(dict.fromkeys(sent)) == order, "the files may go twice: once before the flush"


@pytest.mark.slow
def test_last_goes_at_its_interval_the_newest_of_them_and_at_the_end(setting):
    uploader = setting.uploader(last_interval_s=3.0)  # long enough for a machine that stands still for a second
    uploader.start()
    uploader.offer(*setting.checkpoint(10, "last"))
    time.sleep(0.4)
    assert named(setting, "last") is None
    uploader.offer(*setting.checkpoint(20, "last"))
    deadline = time.monotonic() + 20
    while named(setting, "last") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert named(setting, "last").step == 20
    uploader.offer(*setting.checkpoint(30, "last"))
    assert uploader.flush(10)
    assert named(setting, "last").step == 30


def test_a_last_that_is_the_best_goes_once(setting):
    uploader = setting.uploader()
    uploader.start()
    _, path, sidecar = setting.checkpoint(10)
    uploader.offer("best", path, sidecar)
    uploader.offer("last", path, sidecar)
    assert uploader.flush(10)
    assert named(setting).step == 10 and named(setting, "last") is None


def test_the_small_files_go_along_and_again_when_they_change(setting):
    folder = setting.folder
    folder.config.write_text("seed: 1\n")
    folder.record.write_text("{}\n")
    (folder.tensorboard).mkdir()
    (folder.tensorboard / "events.out.tfevents.1.host.2.0").write_bytes(b"one")
    (folder.path / "secret.key").write_text("no file of ours")
    (folder.path / "outside.csv").symlink_to("/etc/passwd")
    uploader = setting.uploader(files_interval_s=0.2)
    uploader.start()
    time.sleep(0.5)
    (folder.tensorboard / "events.out.tfevents.1.host.2.0").write_bytes(b"one two")
    time.sleep(0.6)
    run = setting.bucket_run()
    assert read_small(run.store, f"{run.root}tensorboard/events.out.tfevents.1.host.2.0")[0] == b"one two"
    names = sorted(key.removeprefix(run.root) for key, _ in run.store.list(run.root))
    assert names == ["config.yaml", "generation.json", "run.json", "tensorboard/events.out.tfevents.1.host.2.0"]


def test_a_file_that_was_damaged_here_is_said_and_not_tried_for_ever(setting, said):
    uploader = setting.uploader()
    uploader.start()
    kind, path, sidecar = setting.checkpoint(10)
    path.write_bytes(b"damaged")
    uploader.offer(kind, path, sidecar)
    assert uploader.flush(10)
    assert "damaged on this machine" in uploader.status().error
    assert len(said.messages) == 1 and named(setting) is None


def test_a_start_takes_up_what_the_one_before_left(setting):
    setting.uploader().offer(*setting.checkpoint(10))
    uploader = setting.uploader()
    uploader.start()
    assert uploader.flush(10)
    assert named(setting).step == 10


def test_what_is_left_never_goes_over_a_later_step(setting):
    setting.uploader().offer(*setting.checkpoint(10))
    elsewhere = setting.bucket_run()
    elsewhere.prepare()
    elsewhere.move("best", elsewhere.store.put(elsewhere.checkpoint_key("best", 50, "cd" * 32), b"x"), step=50)
    uploader = setting.uploader()
    uploader.start()
    assert uploader.flush(10)
    assert named(setting).step == 50


def test_a_process_that_comes_back_uploads_nothing_more(setting):
    old = setting.uploader()
    old.start()
    old.offer(*setting.checkpoint(10))
    assert old.flush(10)
    setting.bucket_run().prepare()
    old.offer(*setting.checkpoint(99))
    assert not old.flush(10)
    assert named(setting).step == 10
    assert "a newer start of this run (number 2) has taken over" in old.status().error
    assert not old.is_alive or old._stopped


def test_a_disk_without_room_even_for_a_link(setting, monkeypatch, said):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lockstep.storage.outbox.os.link", full)
    uploader = setting.uploader()
    uploader.start()
    uploader.offer(*setting.checkpoint(10))
    assert uploader.flush(10)
    assert named(setting).step == 10
    assert said.messages == ["s3: the disk is full; uploading the checkpoint from where it lies."]


def test_a_mistake_of_ours_does_not_end_the_uploads(setting, monkeypatch, said):
    real, failed = Uploader._send, []

    def send(self, item):
        if item.kind == "best" and not failed:
            failed.append(item)
            raise ZeroDivisionError
        return real(self, item)

    monkeypatch.setattr(Uploader, "_send", send)
    uploader = setting.uploader()
    uploader.start()
    uploader.offer(*setting.checkpoint(10))
    assert uploader.flush(10)
    assert named(setting).step == 10
    assert "ZeroDivisionError in test_uploader.py" in said.messages[0]


@pytest.mark.slow
def test_a_store_that_is_killed_in_the_middle_and_comes_back(tmp_path, monkeypatch, said):
    with object_store(tmp_path / "store") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        address = S3Options(
            f"s3://{server.new_bucket()}/runs", server.endpoint_url, connect_timeout_s=1, read_timeout_s=5
        )
        setting = Setting(tmp_path, S3Store(address, part_bytes=5 * MIB))
        uploader = setting.uploader(retry_delays_s=(0.3,))
        uploader.start()
        assert uploader.flush(10)
        part_sent = threading.Event()
        call = S3Requests.call

        def watched(self, method, **arguments):
            answer = call(self, method, **arguments)
            if method == "upload_part":
                part_sent.set()
                time.sleep(0.05)
            return answer

        monkeypatch.setattr(S3Requests, "call", watched)
        uploader.offer(*setting.checkpoint(10, num_bytes=80 * MIB))
        assert part_sent.wait(10)
        server.kill()
        assert not uploader.flush(2.0)
        assert uploader.status().left == ("best",)
        for step in (20, 30, 40):
            uploader.offer(*setting.checkpoint(step))
        waiting = list(setting.folder.path.glob("upload/rank*"))
        assert len(waiting) <= 2, "bounded: the one that is tried, the one that waits"
        server.start()
        assert uploader.flush(30)
        assert named(setting).step == 40
        assert uploader.status().error is None
        assert not list(setting.store.parts.unfinished("")), "no orphan part"
        assert any("next try in 0.3 s, at " in line for line in said.messages)
        assert all("store" in line for line in said.messages)
        uploader.stop()  # or it tries this store again, line by line, as long as the tests run


def test_delays_grow_and_start_again_after_a_success(setting, monkeypatch, said):
    def fail(self, item):
        raise StoreError("busy", "the store is too busy")

    real = Uploader._send
    monkeypatch.setattr(uploader_module, "RETRY_DELAY_AT_END_S", 1.0)
    uploader = setting.uploader(retry_delays_s=(0.05, 0.1, 0.2))
    monkeypatch.setattr(Uploader, "_send", fail)
    uploader.offer(*setting.checkpoint(10))
    uploader.start()
    deadline = time.monotonic() + 5
    while len(said.messages) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    monkeypatch.setattr(Uploader, "_send", real)
    assert uploader.flush(10)
    delays = [line.partition("next try in ")[2].partition(" s")[0] for line in said.messages]
    assert delays[:4] == ["0.05", "0.1", "0.2", "0.2"]
    assert uploader._failures == 0


def test_training_threads_keep_their_priority(setting):
    niceness = []

    class Watched(Uploader):
        def _send(self, item):
            niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return StoredObject("k", 0, "s")

    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    uploader = Watched(setting.bucket_run(), setting.folder)
    setting.uploaders.append(uploader)
    uploader.start()
    assert uploader.flush(5)
    assert min(niceness) > mine == os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_another_ranks_shards_of_a_last_wait_for_their_upload(setting):
    """Only rank 0 knows the whole's sha256, and nothing is the best for having none."""
    uploader = setting.uploader(rank=1)
    folder = setting.folder.checkpoints / "last-step00000010.ckpt"
    folder.mkdir()
    (folder / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"x" * 100)
    uploader.offer("last", folder, Sidecar(10))
    assert uploader.status().left == ("last",) and uploader.outbox.ranks() == [1]


def test_a_rank_notes_which_start_its_shards_are_of(setting):
    """On a node without rank 0 whoever sends what is left has only the outbox to know it from."""
    first, second = (setting.uploader(rank=rank) for rank in (0, 1))
    second.run.start_id = first.run.start_id
    first.run.prepare()
    folder = setting.folder.checkpoints / "best-step00000010.ckpt"
    folder.mkdir()
    (folder / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"x" * 100)
    second.start()
    second.offer("best", folder, Sidecar(10))
    assert second.flush(10) and second.outbox.notes().generation == first.run.generation == 1
