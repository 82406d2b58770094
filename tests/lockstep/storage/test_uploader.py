"""The background thread and its spool: order, replacement, retries, flush; against a real S3 server."""

import hashlib
import os
import threading
import time

import pytest

from lockstep.runs.folder import RunFolder
from lockstep.storage import uploader as uploader_module
from lockstep.storage.bucket import Bucket
from lockstep.storage.outbox import Spool
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.s3 import S3Options, StoreError
from lockstep.storage.uploader import Uploader
from object_store import object_store, shared_store

MIB = 2**20


@pytest.fixture(scope="module")
def bucket_name():
    return shared_store().new_bucket()


_number = iter(range(1000))


class Setting:
    """A run folder, its place in the bucket, and what the uploader said."""

    def __init__(self, tmp_path, server, bucket_name):
        self.options = S3Options(f"s3://{bucket_name}/runs", server.endpoint_url, connect_timeout_s=1, read_timeout_s=5)
        self.folder = RunFolder(tmp_path / f"run-{next(_number)}")
        self.folder.checkpoints.mkdir(parents=True)
        self.said: list[str] = []
        self.uploaders: list[Uploader] = []

    def bucket_run(self) -> RunBucket:
        return RunBucket(Bucket(self.options, part_bytes=5 * MIB), self.options.prefix, self.folder.run_id)

    def uploader(self, **settings) -> Uploader:
        made = Uploader(
            self.bucket_run(), self.folder, say=self.said.append, **{"retry_delays_s": (0.1, 0.2), **settings}
        )
        self.uploaders.append(made)
        return made

    def checkpoint(self, step: int, kind: str = "best", num_bytes: int = 1000, seed: int = 0):
        data = hashlib.shake_128(f"{step}{seed}".encode()).digest(num_bytes)
        path = self.folder.checkpoints / f"{kind}-step{step:08d}.ckpt"
        path.write_bytes(data)
        sidecar = {"bytes": num_bytes, "sha256": hashlib.sha256(data).hexdigest(), "epoch": 0, "step": step}
        return kind, path, {**sidecar, "metric": {"val/acc": 0.5}}


@pytest.fixture
def setting(monkeypatch, tmp_path, bucket_name):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    made = Setting(tmp_path, server, bucket_name)
    yield made
    for uploader in made.uploaders:
        uploader.stop()


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
    assert (pointer.step, pointer.sha256) == (10, sidecar["sha256"])
    assert uploader.run.bucket.sha256_of(pointer.key) == sidecar["sha256"]
    status = uploader.status()
    assert status["uri"] == f"s3://{setting.options.bucket}/{pointer.key}"
    assert (status["sha256"], status["error"], status["left"]) == (sidecar["sha256"], None, [])
    assert status["seconds"] > 0
    assert not list(setting.folder.path.glob("upload/rank*")), "the spool is empty again"


def test_offering_costs_a_link_and_no_copy(setting):
    uploader = setting.uploader()
    kind, path, sidecar = setting.checkpoint(10)
    uploader.offer(kind, path, sidecar)
    spooled = next(setting.folder.path.glob("upload/rank00000-best-step00000010/*.ckpt"))
    assert os.path.samefile(spooled, path)


def test_a_newer_best_replaces_the_one_that_waits(setting):
    uploader = setting.uploader()
    for step in (10, 20, 30):
        uploader.offer(*setting.checkpoint(step))
    assert [item.step for item in Spool(setting.folder.path / "upload").left()] == [30]
    uploader.start()
    assert uploader.flush(20)
    assert named(setting).step == 30 and named(setting).previous is None


def test_best_goes_before_last_and_an_urgent_last_before_all(setting, monkeypatch):
    sent = []
    monkeypatch.setattr(Uploader, "_send", lambda self, item: sent.append(item.kind) or {"key": "k", "sha256": "s"})
    for urgent, order in ((False, ["best", "last", "files"]), (True, ["last", "best", "files"])):
        sent.clear()
        uploader = setting.uploader(last_interval_s=0.0)
        if urgent:
            uploader.hurry()
        uploader.offer(*setting.checkpoint(10, "last", seed=1))
        uploader.offer(*setting.checkpoint(10, "best"))
        uploader.start()
        assert uploader.flush(5)
        assert sent == order


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
    assert run.bucket.read_small(f"{run.root}tensorboard/events.out.tfevents.1.host.2.0")[0] == b"one two"
    names = sorted(key.removeprefix(run.root) for key, _ in run.bucket.keys(run.root))
    assert names == ["config.yaml", "generation.json", "run.json", "tensorboard/events.out.tfevents.1.host.2.0"]


def test_a_file_that_was_damaged_here_is_said_and_not_tried_for_ever(setting):
    uploader = setting.uploader()
    uploader.start()
    kind, path, sidecar = setting.checkpoint(10)
    path.write_bytes(b"damaged")
    uploader.offer(kind, path, sidecar)
    assert uploader.flush(10)
    assert "damaged on this machine" in uploader.status()["error"]
    assert len(setting.said) == 1 and named(setting) is None


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
    stored = elsewhere.bucket.put_bytes(elsewhere.checkpoint_key("best", 50, "cd" * 32), b"x")
    facts = {"key": stored.key, "bytes": 1, "sha256": stored.sha256, "epoch": 0, "step": 50, "metric": {}}
    elsewhere.move("best", facts)
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
    assert "a newer start of this run (number 2) has taken over" in old.status()["error"]
    assert not old.is_alive or old._stopped


def test_a_disk_without_room_even_for_a_link(setting, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lockstep.storage.outbox.os.link", full)
    uploader = setting.uploader()
    uploader.start()
    uploader.offer(*setting.checkpoint(10))
    assert uploader.flush(10)
    assert named(setting).step == 10
    assert setting.said == ["s3: the disk is full; uploading the checkpoint from where it lies."]


def test_a_mistake_of_ours_does_not_end_the_uploads(setting, monkeypatch):
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
    assert "ZeroDivisionError in test_uploader.py" in setting.said[0]


@pytest.mark.soak
def test_a_store_that_is_killed_in_the_middle_and_comes_back(tmp_path, monkeypatch):
    with object_store(tmp_path / "store") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        setting = Setting(tmp_path, server, server.new_bucket())
        uploader = setting.uploader(retry_delays_s=(0.3,))
        uploader.start()
        assert uploader.flush(10)
        part_sent = threading.Event()
        call = Bucket._call

        def watched(self, method, **arguments):
            answer = call(self, method, **arguments)
            if method == "upload_part":
                part_sent.set()
                time.sleep(0.05)
            return answer

        monkeypatch.setattr(Bucket, "_call", watched)
        uploader.offer(*setting.checkpoint(10, num_bytes=80 * MIB))
        assert part_sent.wait(10)
        server.kill()
        assert not uploader.flush(2.0)
        assert uploader.status()["left"] == ["best"]
        for step in (20, 30, 40):
            uploader.offer(*setting.checkpoint(step))
        spooled = list(setting.folder.path.glob("upload/rank*"))
        assert len(spooled) <= 2, "bounded: the one that is tried, the one that waits"
        server.start()
        assert uploader.flush(30)
        assert named(setting).step == 40
        assert uploader.status()["error"] is None
        assert uploader.run.bucket.abort_unfinished(uploader.run.root) == 0, "no orphan part"
        assert any("next try in 0.3 s, at " in line for line in setting.said)
        assert all("store" in line for line in setting.said)


def test_delays_grow_and_start_again_after_a_success(setting, monkeypatch):
    def fail(self, item):
        raise StoreError("busy", "the store is too busy")

    real = Uploader._send
    monkeypatch.setattr(uploader_module, "RETRY_DELAY_AT_END_S", 1.0)
    uploader = setting.uploader(retry_delays_s=(0.05, 0.1, 0.2))
    monkeypatch.setattr(Uploader, "_send", fail)
    uploader.offer(*setting.checkpoint(10))
    uploader.start()
    deadline = time.monotonic() + 5
    while len(setting.said) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    monkeypatch.setattr(Uploader, "_send", real)
    assert uploader.flush(10)
    delays = [line.partition("next try in ")[2].partition(" s")[0] for line in setting.said]
    assert delays[:4] == ["0.05", "0.1", "0.2", "0.2"]
    assert uploader._failures == 0


def test_training_threads_keep_their_priority(setting):
    niceness = []

    class Watched(Uploader):
        def _send(self, item):
            niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
            return {"key": "k", "sha256": "s"}

    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    uploader = Watched(setting.bucket_run(), setting.folder, say=setting.said.append)
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
    uploader.offer("last", folder, {"step": 10, "epoch": 0})
    assert uploader.status()["left"] == ["last"] and uploader.spool.ranks() == [1]


def test_a_rank_notes_which_start_its_shards_are_of(setting):
    """On a node without rank 0 whoever sends what is left has only the spool to know it from."""
    first, second = (setting.uploader(rank=rank) for rank in (0, 1))
    second.run.start_id = first.run.start_id
    first.run.prepare()
    folder = setting.folder.checkpoints / "best-step00000010.ckpt"
    folder.mkdir()
    (folder / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"x" * 100)
    second.start()
    second.offer("best", folder, {"step": 10, "epoch": 0})
    assert second.flush(10) and second.spool.notes()["generation"] == first.run.generation == 1
