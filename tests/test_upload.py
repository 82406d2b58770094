"""What is left when a process is gone: kills in the middle of uploads, the door, secrets; against a real S3 server."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import upload
from lockstep.runs.errors import EXIT_NOT_UPLOADED, EXIT_OK
from lockstep.runs.files import checksum_of
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import BestCheckpoint, RunRecord, read_record, update_record, write_record
from lockstep.storage import finish as upload_left_module
from lockstep.storage.bucket import read_small, sha256_of_object
from lockstep.storage.checkpoint_files import Sidecar, write_sidecar
from lockstep.storage.fetch import fetch_run
from lockstep.storage.finish import finish_upload, upload_left
from lockstep.storage.outbox import Outbox
from lockstep.storage.pointer import OBJECT_NAME
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_options import S3Options
from object_store import KEY_IDS, SECRETS, object_store, shared_store

MIB = 2**20
SRC = Path(__file__).resolve().parents[1] / "src"

# One process of a run: offers better and better checkpoints, slowly sent, until it is killed
CHILD = """
import hashlib, os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from lockstep.runs.folder import RunFolder
from lockstep.storage.checkpoint_files import Sidecar, write_sidecar
from lockstep.storage.run_bucket import RunBucket
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_client import S3Requests
from lockstep.storage.s3_options import S3Options
from lockstep.storage.uploader import Uploader

uri, endpoint_url, path, first = sys.argv[1:]
folder = RunFolder(Path(path))
call, offered = S3Requests.call, []
def slow(self, method, **arguments):
    answer = call(self, method, **arguments)
    if method == "upload_part" and offered:
        os.write(2, b"part\\n")
        time.sleep(0.03)
    return answer
S3Requests.call = slow
options = S3Options(uri, endpoint_url)
uploader = Uploader(RunBucket(S3Store(options, part_bytes=5 << 20), folder.run_id), folder)
uploader.start()
for step in range(int(first), int(first) + 3):
    data = hashlib.shake_128(str(step).encode()).digest(64) * (40 << 14)
    best = folder.checkpoints / f"best-step{step:08d}.ckpt"
    best.parent.mkdir(parents=True, exist_ok=True)
    best.write_bytes(data)
    sidecar = Sidecar.of(checksum_of(best), step=step, metric={"val/acc": step / 100})
    write_sidecar(best, sidecar)
    uploader.offer("best", best, sidecar)
    offered.append(best)
    uploader.flush(60)
"""


class Setting:
    def __init__(self, tmp_path, server):
        self.server = server
        self.options = S3Options(f"s3://{server.new_bucket()}/runs", server.endpoint_url, connect_timeout_s=1)
        self.folder = RunFolder(tmp_path / "logs" / "train" / "runs" / "the-run")
        self.folder.checkpoints.mkdir(parents=True)
        write_record(self.folder.record, RunRecord(run_id="the-run", status="failed"))
        s3 = {"uri": self.options.uri, "endpoint_url": server.endpoint_url, "flush_timeout_s": 5.0}
        text = json.dumps({"s3": s3})
        self.folder.config.write_text(text)
        self.s3 = s3

    def run(self) -> RunBucket:
        return RunBucket(S3Store(self.options), "the-run")

    def child(self, first: int) -> subprocess.Popen:
        environment = {**os.environ, **self.server.environment(), "PYTHONPATH": str(SRC)}
        arguments = [sys.executable, "-c", CHILD, self.options.uri, self.server.endpoint_url]
        return subprocess.Popen(
            [*arguments, str(self.folder.path), str(first)], env=environment, stderr=subprocess.PIPE, text=True
        )

    def best(self, step: int):
        data = hashlib.shake_128(str(step).encode()).digest(1000)
        path = self.folder.checkpoints / f"best-step{step:08d}.ckpt"
        path.write_bytes(data)
        sidecar = Sidecar.of(checksum_of(path), step=step)
        write_sidecar(path, sidecar)
        with update_record(self.folder.record) as record:
            best = BestCheckpoint(path=f"checkpoints/{path.name}", step=step, sha256=sidecar.sha256)
            record.best_checkpoint = best
        return "best", path, sidecar


@pytest.fixture
def setting(monkeypatch, tmp_path):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(upload_left_module, "MIN_TIMEOUT_S", 0.5)
    return Setting(tmp_path, server)


def check_the_pointer(setting) -> int | None:
    """best.json, if there is one, names a complete object whose sha256 fits; its step."""
    pointer, etag = setting.run().read_pointer("best")
    assert (pointer is None) == (etag is None)
    if pointer is None:
        return None
    store = setting.run().store
    assert store.head(pointer.key).bytes == pointer.bytes
    assert sha256_of_object(store, pointer.key) == pointer.sha256
    return pointer.step


@pytest.mark.slow
def test_five_kills_in_the_middle_of_an_upload(setting, tmp_path):
    reached = []
    for kill, parts in enumerate((2, 5, 11, 14, 3)):
        child = setting.child(first=10 * (kill + 1))
        for _ in range(parts):
            assert child.stderr.readline() == "part\n"
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stderr.close()
        reached.append(check_the_pointer(setting))
    assert reached[-1] is not None and reached == sorted(reached, key=lambda step: step or 0)

    assert finish_upload(setting.s3, setting.folder, 0) == EXIT_OK
    run = setting.run()
    assert check_the_pointer(setting) >= 50
    run.prepare()
    assert list(run.store.parts.unfinished("")) == [], "no orphan part is left after the next start"
    objects = [key.removeprefix(f"{run.root}checkpoints/") for key, _ in run.store.list(f"{run.root}checkpoints/")]
    assert len(objects) <= 2 and all(OBJECT_NAME.fullmatch(name) for name in objects)

    elsewhere = RunFolder(tmp_path / "elsewhere" / "the-run")
    fetched = fetch_run(setting.run().store, elsewhere)
    assert fetched is not None and fetched.name.startswith("best-step0000005")


def test_the_end_of_a_run_sends_what_its_process_left(setting, caplog):
    Outbox(setting.folder.path / "upload").add(*setting.best(10))
    assert finish_upload(setting.s3, setting.folder, 0) == EXIT_OK
    assert check_the_pointer(setting) == 10 and caplog.messages == []
    record = read_record(setting.folder.record)
    uri = record.upload.uri
    assert uri.startswith(f"{setting.options.uri}/the-run/checkpoints/best-step00000010-g0001-")
    assert (record.upload.error, record.best_checkpoint.s3_uri) == (None, uri)
    run = setting.run()
    assert read_small(run.store, f"{run.root}run.json")[0] == setting.folder.record.read_bytes(), "the final record"


def test_a_best_that_was_saved_but_never_offered_is_sent_too(setting):
    setting.best(10)
    assert finish_upload(setting.s3, setting.folder, 1) == 1
    assert check_the_pointer(setting) == 10


def test_a_best_that_never_arrived_is_said_in_the_record_and_by_the_exit_code(setting, capsys):
    setting.best(10)
    s3 = {**setting.s3, "endpoint_url": "http://127.0.0.1:9", "flush_timeout_s": 2}
    assert finish_upload(s3, setting.folder, 0) == EXIT_NOT_UPLOADED
    assert "cannot be reached" in read_record(setting.folder.record).upload.error
    assert finish_upload({**s3, "flush_timeout_s": 0.1}, setting.folder, 75) == 75

    logs = setting.folder.path.parents[2]
    assert upload.main(["the-run", f"paths.log_dir={logs}"]) == EXIT_OK
    assert check_the_pointer(setting) == 10
    assert read_record(setting.folder.record).upload.error is None
    assert capsys.readouterr().out.endswith(f"the-run is in {setting.options.uri}.\n")


def test_a_run_that_never_began_is_not_waited_for(setting):
    started = time.monotonic()
    s3 = {**setting.s3, "endpoint_url": "http://127.0.0.1:9", "flush_timeout_s": 300.0}
    assert finish_upload(s3, setting.folder, 2) == 2
    assert time.monotonic() - started < 1


def test_a_start_that_was_refused_does_not_wait_for_a_bucket_that_only_a_person_can_mend(setting, monkeypatch):
    monkeypatch.setattr(upload_left_module, "MIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr(upload_left_module, "REFUSED_TIMEOUT_S", 0.2)
    setting.best(10)
    Outbox(setting.folder.path / "upload").note(generation=1, flush_left_s=300.0)
    started = time.monotonic()
    assert finish_upload({**setting.s3, "endpoint_url": "http://127.0.0.1:9"}, setting.folder, 2) == 2
    assert time.monotonic() - started < 20


def test_a_run_without_s3_is_left_alone(setting):
    before = setting.folder.record.read_text()
    assert finish_upload({"uri": None}, setting.folder, 0) == 0
    assert finish_upload(None, setting.folder, 1) == 1
    assert setting.folder.record.read_text() == before


def test_what_is_left_of_an_older_start_does_not_go_over_a_newer_one(setting):
    older = setting.run()
    older.prepare()
    outbox = Outbox(setting.folder.path / "upload")
    outbox.note(generation=older.generation)
    outbox.add(*setting.best(99), older.generation)
    setting.run().prepare()
    error = upload_left(setting.run().store, setting.folder, 5.0)
    assert "a newer start of this run (number 2) has taken over" in error
    assert check_the_pointer(setting) is None


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [(["nobody"], "No run 'nobody'"), (["the-run", "s4.uri=x"], "is no option"), (["a", "b"], "Name one run"),
     (["the-run", "s3.uri=x"], "An S3 address is"), (["../x"], "cannot name a folder")],
)  # fmt: skip
def test_the_doors_bad_input(setting, capsys, argv, sentence):
    assert upload.main([*argv, f"paths.log_dir={setting.folder.path.parents[2]}"]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_the_door_leaves_a_run_that_still_trains_alone(setting, capsys):
    write_record(setting.folder.record, RunRecord(status="running"))
    assert upload.main(["the-run", f"paths.log_dir={setting.folder.path.parents[2]}"]) == 2
    assert "still training" in capsys.readouterr().err


def test_the_doors_help_comes_without_torch_and_boto3():
    code = "import sys, upload; upload.main(['--help']); assert not {'torch', 'boto3'} & set(sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True
    )
    assert result.returncode == 0 and b"python src/upload.py RUN_ID" in result.stdout


def test_no_secret_reaches_a_file_or_the_output(setting, capfd, caplog, monkeypatch):
    """Normal and failing ways, with every logger at its loudest."""
    import logging

    with caplog.at_level(logging.DEBUG):
        Outbox(setting.folder.path / "upload").add(*setting.best(10))
        finish_upload(setting.s3, setting.folder, 0)
        for name, value in (("AWS_SECRET_ACCESS_KEY", SECRETS[1]), ("AWS_ACCESS_KEY_ID", "NOBODY0000000000")):
            with monkeypatch.context() as patched:
                patched.setenv(name, value)
                setting.best(20)
                finish_upload({**setting.s3, "flush_timeout_s": 0.2}, setting.folder, 0)
        finish_upload({**setting.s3, "endpoint_url": "http://127.0.0.1:9", "flush_timeout_s": 0.2}, setting.folder, 0)
    out, err = capfd.readouterr()
    text = out + err + caplog.text
    assert read_record(setting.folder.record).upload.error is not None
    for path in setting.folder.path.rglob("*"):
        text += path.read_bytes().decode("latin-1") if path.is_file() else ""
    for key, _ in setting.run().store.list(""):
        text += (read_small(setting.run().store, key)[0] or b"").decode("latin-1")
    found = [secret for secret in [*SECRETS, *KEY_IDS, "X-Amz-Signature", "AWS4-HMAC"] if secret in text]
    assert found == []


@pytest.mark.slow
def test_a_store_whose_disk_is_full(tmp_path, monkeypatch):
    """The checkpoint stays in the outbox, the sentence says what is wrong, and it arrives once there is room."""
    with object_store(tmp_path / "store", max_volumes=1) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        setting = Setting(tmp_path, server)
        server.client().put_object(Bucket=server.new_bucket(), Key="takes-the-only-volume", Body=b"x" * 100_000)
        Outbox(setting.folder.path / "upload").add(*setting.best(10))
        assert finish_upload({**setting.s3, "flush_timeout_s": 0.1}, setting.folder, 0) == 3
        error = read_record(setting.folder.record).upload.error
        assert error.endswith("failed (HTTP 500, InternalError); it or the bucket may be full")
        assert [item.step for item in Outbox(setting.folder.path / "upload").left()] == [10]
        server.stop()
        server.max_volumes = 100
        server.start()
        assert finish_upload(setting.s3, setting.folder, 0) == EXIT_OK
        assert check_the_pointer(setting) == 10


@pytest.mark.slow
def test_a_bucket_that_is_full(tmp_path, monkeypatch):
    """As with a full disk: the sentence, the outbox keeps the checkpoint, it arrives once the quota is raised."""
    with object_store(tmp_path / "store") as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        setting = Setting(tmp_path, server)
        noise = os.urandom(3 * MIB)  # what repeats would be compressed
        server.client().put_object(Bucket=setting.options.bucket, Key="fills-it", Body=noise)
        server.set_quota(setting.options.bucket, megabytes=1, full=True)
        Outbox(setting.folder.path / "upload").add(*setting.best(10))
        assert finish_upload({**setting.s3, "flush_timeout_s": 0.1}, setting.folder, 0) == 3
        assert "may be full" in read_record(setting.folder.record).upload.error
        assert [item.step for item in Outbox(setting.folder.path / "upload").left()] == [10]
        server.set_quota(setting.options.bucket, megabytes=1000, full=False)
        assert finish_upload(setting.s3, setting.folder, 0) == EXIT_OK
        assert check_the_pointer(setting) == 10
