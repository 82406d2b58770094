"""Uploads of a run, what a killed process leaves, and what another machine fetches.

Against a real S3 server.
"""

import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import upload
from lockstep.checkpoints import files as checkpoint_files
from lockstep.checkpoints.files import (
    Sidecar,
    complete_checkpoints,
    fault_of,
    newest_whole,
    read_sidecar,
    write_sidecar,
)
from lockstep.process.errors import EXIT_NOT_UPLOADED, EXIT_OK, UserError
from lockstep.process.files import sha256_of
from lockstep.records.folder import RunFolder
from lockstep.records.record import (
    JsonObject,
    RunRecord,
    read_record,
    status_of,
    update_record,
    write_record,
    write_record_as_is,
)
from lockstep.storage import uploader as module
from lockstep.storage.errors import OtherRunError
from lockstep.storage.fetch import fetch_checkpoints, fetch_record, locate_checkpoint
from lockstep.storage.pointers import KINDS, read_pointer
from lockstep.storage.s3 import Bucket
from lockstep.storage.uploader import Uploader, finish_upload, send_files
from object_store import SECRETS, FaultyProxy, shared_store
from ranks import SRC

MIB, KILLS = 2**20, 8
# The transfer manager of boto3 leaves the file of a broken-off upload open until it is collected.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Setting:
    """A run whose training has ended, and a place for it in a bucket."""

    def __init__(self, logs: Path, s3: dict, uuid: str = "5" * 32) -> None:
        self.s3, self.folder = s3, RunFolder(logs / "train/runs/the-run")
        self.run, self.client = Bucket.from_config(s3).joinpath("the-run"), shared_store().client()
        self.folder.checkpoints.mkdir(parents=True)
        write_record(
            self.folder.record_path, RunRecord(run_id="the-run", uuid=uuid, status="failed")
        )
        self.folder.config_path.write_text(json.dumps({"s3": s3}))

    def checkpoint(self, step: int, kind: str = "best", num_bytes: int = 1000) -> Path:
        path = self.folder.checkpoints / f"{kind}-step{step:08d}.ckpt"
        path.write_bytes(
            hashlib.shake_128(f"{step}{kind}".encode()).digest(1000) * (num_bytes // 1000)
        )
        write_sidecar(path, Sidecar(step, epoch=step // 10, metric={"val/acc": step / 100}))
        if kind == "best":
            with update_record(self.folder.record_path) as record:
                record.best_checkpoint = JsonObject(path=f"checkpoints/{path.name}", step=step)
        return path

    def uploader(self, start: float | None = None) -> Uploader:
        made = Uploader(replace(self.run), self.folder, start or time.time())
        made.start()
        return made

    def elsewhere(self, name: object, uuid: str = "5" * 32) -> "Setting":
        """A run of this id on another machine, with a folder of its own: the same one, or
        another.
        """
        return Setting(self.folder.path.parents[2] / f"elsewhere-{name}", self.s3, uuid)

    def finish(self, code: int = EXIT_OK, **changes) -> int:
        code = finish_upload({**self.s3, **changes}, self.folder, code)
        send_files({**self.s3, **changes}, self.folder, is_short=code != EXIT_OK)
        return code

    def pointed(self, kind: str = "best") -> int | None:
        """The step that the pointer names, after its object was found to be whole."""
        pointer = read_pointer(self.run, kind)
        if pointer.checkpoint is None:
            return None
        found = self.client.get_object(Bucket=self.run.name, Key=self.run.prefix + pointer.key)[
            "Body"
        ].read()
        assert hashlib.sha256(found).hexdigest() == pointer.checkpoint.sha256
        return pointer.checkpoint.step

    def objects(self) -> list[str]:
        return [key for key, _, _ in self.run.list("checkpoints/")]

    def unfinished(self) -> list:
        return self.client.list_multipart_uploads(Bucket=self.run.name).get("Uploads", [])


@pytest.fixture
def setting(monkeypatch, tmp_path):
    server = shared_store()
    monkeypatch.setattr(module, "LONGEST_DELAY_S", 0.1)
    monkeypatch.setattr(module, "POLL_S", 0.1)
    for variable, value in server.environment().items():
        monkeypatch.setenv(variable, value)
    uri = f"s3://{server.new_bucket()}/my rüns+"
    yield Setting(
        tmp_path / "logs",
        {"uri": uri, "endpoint_url": server.endpoint_url, "flush_timeout_s": 30.0},
    )
    gc.collect()


def fetch_all(run: Bucket, folder: RunFolder) -> None:
    """Bring a run back, as resume=auto does."""
    fetch_record(run, folder)
    fetch_checkpoints(run, folder)


AWAY = {"endpoint_url": "http://127.0.0.1:9"}


# While it trains


def test_the_newest_of_each_kind_replaces_the_one_before(setting):
    uploader = setting.uploader()
    for step in (10, 20, 30):
        setting.checkpoint(step)
        deadline = time.monotonic() + 30
        while setting.pointed() != step:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    setting.checkpoint(40, "last")
    time.sleep(0.3)
    assert setting.pointed("last") is None, "the interval has not gone by"
    assert uploader.flush(30) and setting.pointed() == 30 and setting.pointed("last") == 40
    assert [key[12:29] for key in setting.objects()] == ["best-step00000030", "last-step00000040"]
    assert setting.run.read("run.json")[0] == setting.folder.record_path.read_bytes()
    status = uploader.status()
    assert (status.step, status.error) == (30, None)
    assert status.uri == f"{setting.run.uri}/{setting.objects()[0]}"
    assert list((setting.folder.path / "upload").glob("*.ckpt")) == []
    checkpoint_files.link(
        setting.checkpoint(50), setting.folder.checkpoints / "last-step00000050.ckpt"
    )
    assert uploader.flush(30) and setting.pointed() == 50 and setting.pointed("last") == 40, (
        "equal files are sent once"
    )
    uploader.stop()


def test_a_checkpoint_comes_after_the_metrics_of_its_steps(setting):
    """The machine may be lost in the second after."""
    uploader = setting.uploader()
    assert uploader.flush(30)
    setting.folder.metrics.write_text("step\n10\n")
    setting.checkpoint(10)
    deadline = time.monotonic() + 30
    while setting.pointed() != 10:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert setting.run.read("metrics.csv")[0] == b"step\n10\n"
    uploader.stop()


def test_a_file_may_go_while_it_is_sent_without_links(setting, monkeypatch):
    monkeypatch.setattr(
        checkpoint_files.os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "no links"))
    )
    path, upload = setting.checkpoint(10), Bucket.upload
    monkeypatch.setattr(
        Bucket, "upload", lambda *given: (path.unlink(missing_ok=True), upload(*given))
    )
    uploader = setting.uploader()
    assert uploader.flush(30) and setting.pointed() == 10 and not path.exists()
    uploader.stop()


def test_credentials_are_renewed_between_two_tries(setting, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    setting.checkpoint(10)
    uploader = setting.uploader()
    assert not uploader.flush(1) and "secret key does not fit" in uploader.status().error
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRETS[0])
    assert uploader.flush(30) and setting.pointed() == 10
    uploader.stop()


def test_a_stopped_upload_ends_soon_and_leaves_nothing_unfinished(setting):
    with FaultyProxy(urlsplit(setting.s3["endpoint_url"]).port) as proxy:
        setting.run = replace(setting.run, endpoint_url=proxy.endpoint_url)
        uploader = setting.uploader()
        assert uploader.flush(30)
        setting.checkpoint(10, num_bytes=100 * MIB)
        time.sleep(0.5)
        started = time.monotonic()
        uploader.stop(20)
        assert time.monotonic() - started < 10
    assert not setting.unfinished()


# Two starts of one run


def test_an_older_start_cannot_move_or_create_a_pointer(setting, caplog):
    caplog.set_level("INFO")
    setting.checkpoint(50)
    old = setting.uploader(start=1000.0)
    assert old.flush(30) and setting.pointed() == 50
    there = setting.elsewhere("new")
    new = there.uploader(start=900.0)  # its clock is behind
    assert new.flush(30)
    setting.checkpoint(60, "last")
    assert not old.flush(30) and setting.pointed("last") is None, (
        "the newer start has no last checkpoint yet"
    )
    assert "this process uploads nothing more" in caplog.text
    there.checkpoint(40)
    assert new.flush(30) and setting.pointed() == 40, "the newer start went on from an earlier step"
    setting.checkpoint(70)
    assert setting.finish() == EXIT_NOT_UPLOADED
    assert (
        "a newer start of this run has taken over"
        in read_record(setting.folder.record_path).upload.error
    )
    assert setting.pointed() == 40, "what the older start left does not go over it"
    new.stop()


# Two runs of one id, and files of others


def test_another_run_in_the_bucket_is_refused_first(setting):
    setting.checkpoint(50)
    assert setting.finish() == EXIT_OK
    objects = list(setting.run.list())
    other = setting.elsewhere("other", uuid="6" * 32)
    other.checkpoint(10)
    uploader = other.uploader()
    assert not uploader.flush(30) and "another run named the-run" in uploader.status().error
    assert other.finish() == EXIT_NOT_UPLOADED
    with pytest.raises(OtherRunError, match="another s3.uri="):
        fetch_record(setting.run, other.folder)
    assert list(setting.run.list()) == objects


def without_uuid(setting) -> None:
    """Make the place of a run what version 2.0.0 has left."""
    for kind in KINDS:
        pointer = json.loads(setting.run.read(f"{kind}.json")[0])
        old = {name: pointer[name] for name in pointer if name not in ("uuid", "leftovers")}
        setting.run.write(f"{kind}.json", json.dumps(old).encode())
    setting.run.write("run.json", json.dumps({"started_at": "2026-01-01T00:00:00Z"}).encode())


def test_a_run_of_version_2_gets_its_uuid(setting):
    setting.checkpoint(50)
    assert setting.finish() == EXIT_OK
    without_uuid(setting)
    with update_record(setting.folder.record_path) as record:
        record.started_at = "2026-01-01T00:00:00Z"
    setting.checkpoint(60)
    uploader = setting.uploader()
    assert uploader.flush(30) and setting.pointed() == 60
    assert {read_pointer(setting.run, kind).uuid for kind in KINDS} == {"5" * 32}
    uploader.stop()


def test_a_new_run_is_refused_where_version_2_has_one(setting):
    setting.checkpoint(50)
    assert setting.finish() == EXIT_OK
    without_uuid(setting)
    other = setting.elsewhere("other", uuid="6" * 32)
    with pytest.raises(OtherRunError, match="run_id=the-run resume=auto"):
        other.uploader().claim()
    assert setting.pointed() == 50


def test_files_and_uploads_of_others_stay_in_the_bucket(setting):
    copies = ["checkpoints/my-copy.ckpt", "checkpoints/best-step00000007-00000000.ckpt"]
    for key in copies:
        setting.run.write(key, b"mine")
    copy = setting.run.call("create_multipart_upload", "checkpoints/large-copy.ckpt")
    for step in (10, 20):
        setting.checkpoint(step)
        assert setting.finish() == EXIT_OK
    uploader = setting.uploader()
    assert uploader.flush(30)
    uploader.stop()
    assert [key for key in setting.objects() if key in copies] == sorted(copies)
    assert [upload["UploadId"] for upload in setting.unfinished()] == [copy["UploadId"]]


def test_an_upload_without_a_pointer_is_cleaned_up(setting, monkeypatch):
    """The process is killed between the upload and the pointer, and another machine goes on."""
    setting.checkpoint(10)
    assert setting.finish() == EXIT_OK
    monkeypatch.setattr(Uploader, "_upload", kill_after(Uploader._upload, "checkpoints/"))
    setting.checkpoint(20)
    assert finish_upload(setting.s3, setting.folder, 75) == 75
    assert len(setting.objects()) == 2 and setting.pointed() == 10
    monkeypatch.undo()
    for name, value in shared_store().environment().items():
        monkeypatch.setenv(name, value)
    uploader = setting.elsewhere("next").uploader()
    assert uploader.flush(30) and setting.pointed() == 10 and len(setting.objects()) == 1
    uploader.stop()


def kill_after(upload, prefix: str):
    """Return `upload`, after which the thread does nothing more for a key with this prefix."""

    def interrupted(self, key, *arguments):
        upload(self, key, *arguments)
        if key.startswith(prefix):
            self._stopped = True
            raise OSError("killed")

    return interrupted


# What a killed process leaves

CHILD = """
import itertools, sys, time
from pathlib import Path
from lockstep.records.folder import RunFolder
from lockstep.storage import s3, uploader as module
from lockstep.checkpoints.files import Sidecar, write_sidecar

uri, endpoint_url, path, first = sys.argv[1:]
folder, s3.PART_BYTES = RunFolder(Path(path)), 5 << 20
uploader = module.Uploader(s3.Bucket(uri, endpoint_url).joinpath(folder.run_id), folder, time.time())
uploader.start()
for step in itertools.count(int(first)):
    best = folder.checkpoints / f"best-step{step:08d}.ckpt"
    best.write_bytes(step.to_bytes(8, "big") * (20 << 17))
    write_sidecar(best, Sidecar(step))
    print("offered", flush=True)
    uploader.flush(60)
"""


def kill_while_it_uploads(setting, first: int, uploads: int, after_s: float) -> None:
    """Kill a process that uploads without end, some seconds after it began an upload, the first one
    or a later one.
    """
    words = [setting.s3["uri"], setting.s3["endpoint_url"], str(setting.folder.path), str(first)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, *words], env=environment, stdout=subprocess.PIPE
    ) as child:
        for _ in range(uploads):
            assert child.stdout.readline() == b"offered\n"
        time.sleep(after_s)
        child.kill()
        assert child.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_kills_in_the_midst_of_uploads(setting):
    """After each the pointer names a whole object.

    In the end what was left arrives, and nothing unfinished stays.
    """
    steps = []
    for number in range(KILLS):
        kill_while_it_uploads(setting, 1000 * number + 1, 1 + number % 2, 0.04 * (number % 8))
        steps.append(setting.pointed() or 0)
        assert steps[-1] > 1000 * number or number % 2 == 0, (
            "the second upload began after the first one arrived"
        )
    assert steps == sorted(steps), steps
    best, sidecar = next(complete_checkpoints(setting.folder.checkpoints, "best"))
    assert setting.finish() == EXIT_OK
    assert (
        setting.pointed() == sidecar.step
        and len(setting.objects()) == 1
        and not setting.unfinished()
    )
    there = setting.elsewhere("fresh").folder
    fetch_all(setting.run, there)
    assert sha256_of(newest_whole(there.checkpoints)) == sha256_of(best)


def test_the_rest_is_sent_at_the_end_or_by_upload(setting, capsys):
    before, started = setting.folder.record_path.read_text(), time.monotonic()
    assert setting.finish(2, **AWAY) == 2 and finish_upload({"uri": None}, setting.folder, 0) == 0
    assert time.monotonic() - started < 1 and setting.folder.record_path.read_text() == before, (
        "it has nothing to send"
    )
    setting.checkpoint(10)
    assert setting.finish(**AWAY, flush_timeout_s=2) == EXIT_NOT_UPLOADED
    assert "cannot be reached" in read_record(setting.folder.record_path).upload.error
    assert setting.finish(75, **AWAY, flush_timeout_s=0.1) == 75
    assert upload.main(["the-run", f"paths.log_dir={setting.folder.path.parents[2]}"]) == EXIT_OK
    assert capsys.readouterr().out.endswith(f"the-run is in {setting.s3['uri']}.\n")
    record = read_record(setting.folder.record_path)
    assert setting.pointed() == 10 and record.upload.error is None
    assert (
        record.upload.uri
        == f"{setting.run.uri}/{setting.objects()[0]}"
        == record.best_checkpoint.s3_uri
    )
    assert setting.run.read("run.json")[0] == setting.folder.record_path.read_bytes(), (
        "the final record"
    )
    assert setting.finish() == EXIT_OK, "nothing is left"


@pytest.mark.parametrize(
    ("argv", "status", "sentence"),
    [(["nobody"], "failed", "No run 'nobody'"), (["s3.uri=s3://bbb"], "failed", "run= is missing"),
     (["the-run", "s3.uri=x"], "failed", "An S3 address is"), (["the-run"], "running", "still training")],
)  # fmt: skip
def test_bad_input_of_upload_py(setting, capsys, argv, status, sentence):
    write_record(setting.folder.record_path, RunRecord(status=status))
    assert upload.main([*argv, f"paths.log_dir={setting.folder.path.parents[2]}"]) == 2
    err = capsys.readouterr().err
    assert sentence in err and err.count("\n") == 1


def test_an_upload_neither_revives_nor_bills_a_killed_run(setting):
    setting.checkpoint(10)
    record = read_record(setting.folder.record_path)
    record.status, record.cost = "running", {"price_per_hour": 30.0, "usd": 30.0}
    record.started_at, record.updated_at = "2026-01-01T00:00:00Z", "2026-01-01T01:00:00Z"
    write_record_as_is(setting.folder.record_path, record)
    assert upload.main(["the-run", f"paths.log_dir={setting.folder.path.parents[2]}"]) == EXIT_OK
    after = read_record(setting.folder.record_path)
    assert status_of(after) == "lost" and after.cost["usd"] == 30.0
    assert after.upload.step == setting.pointed() == 10


def test_upload_py_waits_for_the_last_checkpoint_too(setting, capsys, monkeypatch):
    setting.checkpoint(10)
    assert setting.finish() == EXIT_OK
    setting.checkpoint(20, kind="last")
    send = Uploader._send_checkpoint

    def send_slowly(uploader, kind):
        if kind == "last":
            raise TimeoutError
        send(uploader, kind)

    monkeypatch.setattr(Uploader, "_send_checkpoint", send_slowly)
    monkeypatch.setattr(upload, "FLUSH_TIMEOUT_S", 1.0)
    words = ["the-run", f"paths.log_dir={setting.folder.path.parents[2]}"]
    assert upload.main(words) == EXIT_NOT_UPLOADED
    captured = capsys.readouterr()
    assert "not all in" in captured.err and "the-run is in" not in captured.out
    assert setting.pointed() == 10 and setting.pointed("last") is None


def test_upload_py_refuses_a_bucket_that_does_not_exist(setting, capsys):
    setting.checkpoint(10)
    words = ["the-run", "s3.uri=s3://missing", f"paths.log_dir={setting.folder.path.parents[2]}"]
    assert upload.main(words) == 2
    assert "the bucket missing does not exist" in capsys.readouterr().err


def test_an_empty_endpoint_of_upload_py_is_amazons(setting):
    options = dict(upload.OPTIONS, **{"s3.endpoint_url": "", "s3.uri": "s3://other/x"})
    assert upload._bucket_config(setting.folder, options) == {
        "uri": "s3://other/x",
        "endpoint_url": None,
        "flush_timeout_s": 30.0,
    }


def test_upload_says_which_files_were_not_sent(setting, capsys):
    write_record(setting.folder.record_path, RunRecord(status="failed"))
    assert upload.main(["the-run", f"paths.log_dir={setting.folder.path.parents[2]}"]) == 3
    captured = capsys.readouterr()
    assert (
        "the-run is in" not in captured.out
        and "The record and the page of the-run are not in" in captured.err
    )


# On another machine


@pytest.fixture
def located(setting, tmp_path):
    return lambda address: locate_checkpoint(address, tmp_path, setting.s3)


def test_a_checkpoint_comes_from_the_bucket_whole_and_once(setting, located, caplog):
    caplog.set_level("INFO")
    path = setting.checkpoint(10, num_bytes=20 * MIB)
    assert setting.finish() == EXIT_OK
    uri = setting.run.uri
    for address in (uri, f"{uri}/", f"{uri}/{read_pointer(setting.run, 'best').key}"):
        found = located(address)
        assert found.read_bytes() == path.read_bytes() and fault_of(found) is None
    assert caplog.text.count("Fetching") == 1 and read_sidecar(found).metric == {"val/acc": 0.1}
    found.write_bytes(b"torn")
    assert fault_of(located(uri)) is None
    setting.client.put_object(
        Bucket=setting.run.name, Key="of-others/x.ckpt", Body=b"weights"
    )  # without a sha256
    assert "fetched checkpoints" not in caplog.text
    assert located(f"s3://{setting.run.name}/of-others/x.ckpt").read_bytes() == b"weights"
    assert "GB in 2 fetched checkpoints" in caplog.text


@pytest.mark.parametrize("metadata", [{"sha256": "../../../stolen"}, {}])
def test_no_text_of_an_object_leads_out_of_the_cache(setting, tmp_path, monkeypatch, metadata):
    setting.client.put_object(
        Bucket=setting.run.name, Key="of-others/x.ckpt", Body=b"weights", Metadata=metadata
    )
    call = Bucket.call

    def call_hostile_endpoint(bucket, method, *words, **arguments):
        answer = call(bucket, method, *words, **arguments)
        return {**answer, "ETag": '"../../../stolen"'}

    monkeypatch.setattr(Bucket, "call", call_hostile_endpoint)
    logs = tmp_path / "a/b/logs"
    found = locate_checkpoint(f"s3://{setting.run.name}/of-others/x.ckpt", logs, setting.s3)
    assert found.read_bytes() == b"weights" and found.parents[1] == logs / "cache"
    assert not list(tmp_path.rglob("stolen"))


def test_fetched_checkpoints_go_after_a_month_without_use(setting, located, caplog):
    caplog.set_level("INFO")
    setting.checkpoint(10, num_bytes=MIB)
    assert setting.finish() == EXIT_OK
    for name in ("old", "young"):
        content = name.encode()
        setting.client.put_object(Bucket=setting.run.name, Key=f"{name}/x.ckpt", Body=content)
    paths = [located(f"s3://{setting.run.name}/{name}/x.ckpt") for name in ("old", "young")]
    best = located(setting.run.uri)
    for path, days in ((paths[0], 31), (paths[1], 29), (best, 31)):
        then = time.time() - 24 * 3600 * days
        os.utime(checkpoint_files.sidecar_path(path), (then, then))

    assert located(setting.run.uri) == best
    assert [path.exists() for path in (*paths, best)] == [False, True, True]
    assert (
        f"Removed {paths[0]}" in caplog.text
        and not checkpoint_files.sidecar_path(paths[0]).exists()
    )
    assert located(f"s3://{setting.run.name}/old/x.ckpt").read_bytes() == b"old"


def test_what_cannot_be_fetched_is_a_sentence(setting, located, tmp_path):
    def refused(address: str) -> str:
        with pytest.raises(UserError) as caught:
            located(address)
        return str(caught.value)

    assert "there is no readable best.json" in refused(setting.run.uri)
    assert "there is no such object" in refused(f"s3://{setting.run.name}/x.ckpt")
    assert "the bucket no-such-bucket does not exist" in refused("s3://no-such-bucket/x")
    setting.checkpoint(10)
    assert setting.finish() == EXIT_OK
    [key] = setting.objects()
    setting.run.write(key, b"tampered")
    assert "is not what was uploaded" in refused(setting.run.uri)
    pointer = json.loads(setting.run.read("best.json")[0])
    for change in (
        {"key": "../../evil"},
        {"key": "/etc/passwd"},
        {"sha256": "x"},
        {"bytes": -1},
        {"step": "1"},
    ):
        setting.run.write("best.json", json.dumps({**pointer, **change}).encode())
        assert "there is no readable best.json" in refused(setting.run.uri)
    assert not list((tmp_path / "cache").rglob("*.ckpt"))


def test_a_run_comes_back_from_its_bucket(setting, tmp_path, caplog):
    caplog.set_level("INFO")
    setting.folder.metrics.write_text("step\n10\n")
    (setting.folder.tensorboard / "version_0").mkdir(parents=True)
    (setting.folder.tensorboard / "version_0" / "events.out.tfevents.1").write_text("curve")
    setting.checkpoint(10)
    setting.checkpoint(20, "last")
    assert setting.finish() == EXIT_OK
    setting.run.write("plan-node0.yaml", b"of others")
    there = RunFolder(tmp_path / "elsewhere/the-run")
    fetch_all(setting.run, there)
    files = {
        path.relative_to(there.path).as_posix() for path in there.path.rglob("*") if path.is_file()
    }
    assert {name for name in files if not name.endswith(".lock")} == {
        "checkpoints/best-step00000010.ckpt", "checkpoints/best-step00000010.ckpt.json",
        "checkpoints/last-step00000020.ckpt", "checkpoints/last-step00000020.ckpt.json", "run.json", "metrics.csv",
        "from-bucket/config.yaml", "tensorboard/version_0/events.out.tfevents.1", "upload/uuid",
    }  # fmt: skip
    there.metrics.write_text("is newer")
    fetch_all(setting.run, there)
    assert there.metrics.read_text() == "is newer" and caplog.text.count("Fetching") == 2
    [key] = [key for key in setting.objects() if "last" in key]
    setting.run.write(key, b"tampered")
    third = RunFolder(tmp_path / "third/the-run")
    fetch_all(setting.run, third)
    assert (
        newest_whole(third.checkpoints).name == "best-step00000010.ckpt"
        and "Skipped s3://" in caplog.text
    )


def test_a_best_of_weights_alone_comes_with_the_last(setting, caplog):
    best = setting.checkpoint(20)
    write_sidecar(best, replace(read_sidecar(best), weights_only=True))
    setting.checkpoint(10, "last")
    assert setting.finish() == EXIT_OK
    there, away = setting.elsewhere("fresh").folder, replace(setting.run, **AWAY)
    with pytest.raises(UserError, match="cannot be fetched from .* cannot be reached"):
        fetch_all(away, there)
    fetch_all(setting.run, there)
    assert newest_whole(there.checkpoints).name == "last-step00000010.ckpt"
    caplog.set_level("INFO")
    fetch_all(away, there)
    assert "continuing with the local files" in caplog.text


def test_a_damaged_best_is_passed_over(setting, located, tmp_path, caplog):
    caplog.set_level("INFO")
    whole = setting.checkpoint(10)
    damaged = setting.checkpoint(20)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    setting.folder.record_path.write_text("{}")
    found = locate_checkpoint(str(setting.folder.path), tmp_path, None)
    assert found == whole.resolve() and f"Skipped {damaged.name}" in caplog.text
    with pytest.raises(UserError, match="is damaged: its sha256"):
        locate_checkpoint(str(damaged), tmp_path, None)
