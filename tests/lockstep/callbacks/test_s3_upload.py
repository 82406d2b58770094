"""The checkpoints that go to a bucket, and the notice that a spot machine goes away."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.s3_upload import S3Upload
from lockstep.callbacks.spot_notice import SpotNotice
from lockstep.checkpoints.files import Sidecar, write_sidecar
from lockstep.process.errors import Interrupted, UserError
from lockstep.storage.pointers import read_pointer
from object_store import shared_store


@pytest.fixture
def make(monkeypatch, tmp_path):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    (tmp_path / "the-run" / "checkpoints").mkdir(parents=True)
    bucket, made = server.new_bucket(), []

    def callback(**changes):
        settings = {"uri": f"s3://{bucket}/x", "endpoint_url": server.endpoint_url, **changes}
        made.append(S3Upload(tmp_path / "the-run", **settings))
        return made[-1]

    yield callback
    for callback in made:
        if callback.uploader is not None:
            callback.uploader.stop()


def trainer(rank: int = 0, world_size: int = 1, heard=None):
    """What setup needs of a trainer; `heard` is what rank 0 broadcast to this rank."""
    strategy = SimpleNamespace(broadcast=lambda value, src: value if rank == 0 else heard)
    return SimpleNamespace(strategy=strategy, is_global_zero=rank == 0, world_size=world_size)


def checkpoint(callback, step: int, kind: str = "best"):
    path = callback.folder.checkpoints / f"{kind}-step{step:08d}.ckpt"
    path.write_bytes(f"{kind}{step}".encode())
    write_sidecar(path, Sidecar(step))


def step_of(callback, kind: str = "best") -> int:
    return read_pointer(callback.bucket.joinpath("the-run"), kind).checkpoint.step


def test_the_record_names_the_uploaded_best_checkpoint(make):
    callback = make()
    callback.setup(trainer(), None, "fit")
    checkpoint(callback, 10)
    callback.teardown(trainer(), None, "fit")
    fields = callback.record_fields()
    assert step_of(callback) == 10 and fields["upload"]["uri"].startswith(
        f"{callback.bucket.uri}/the-run/checkpoints/"
    )
    assert fields["upload"]["error"] is None
    callback.teardown(trainer(), None, "test")  # a second end is no wait and no error


def test_a_second_fit_uploads_too(make):
    callback = make()
    for step in (10, 20):
        callback.setup(trainer(), None, "fit")
        checkpoint(callback, step)
        callback.teardown(trainer(), None, "fit")
    assert step_of(callback) == 20
    assert callback.record_fields()["upload"]["step"] == 20


def test_an_unusable_bucket_ends_every_rank_before_training(make):
    with pytest.raises(
        UserError, match="^s3://no-such-bucket/x cannot be used: the bucket no-such-bucket does not"
    ):
        make(uri="s3://no-such-bucket/x").setup(trainer(), None, "fit")
    with pytest.raises(UserError, match="because rank 0 said so"):
        make().setup(trainer(1, 2, "because rank 0 said so"), None, "fit")
    with pytest.raises(UserError, match="An S3 address is"):
        make(uri="bucket/prefix")


def test_without_required_it_trains_on(make, caplog):
    caplog.set_level("INFO")
    callback = make(uri="s3://no-such-bucket/x", required=False, flush_timeout_s=2)
    callback.setup(trainer(), None, "fit")
    assert "training starts, uploads are tried again" in caplog.messages[0]
    checkpoint(callback, 10)
    started = time.monotonic()
    callback.teardown(trainer(), None, "fit")
    assert time.monotonic() - started < 10 and "does not exist" in callback.uploader.status().error
    assert callback.uploader.status().uri is None


def test_an_interrupted_run_sends_its_last_at_once(make):
    callback = make()
    callback.setup(trainer(), None, "fit")
    checkpoint(callback, 10, "last")
    callback.on_exception(trainer(world_size=2), None, Interrupted("spot notice"))
    assert step_of(callback, "last") == 10


# Spot notices from a metadata server of the test's own, on loopback.

NOTICE = '{"action": "terminate", "time": "2026-11-21T12:00:00Z"}'


class Metadata(BaseHTTPRequestHandler):
    """IMDSv2: a PUT gives a token, a GET without it is refused."""

    def log_message(self, *_):
        pass

    def answer(self, code, body=""):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PUT(self):
        assert (
            self.path == "/latest/api/token"
            and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        )
        self.answer(200, "the-token")

    def do_GET(self):
        assert self.path == "/latest/meta-data/spot/instance-action"
        self.server.asked += 1
        has_token = self.headers.get("X-aws-ec2-metadata-token") == "the-token"
        self.answer(self.server.code if has_token else 401, self.server.notice)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.asked, server.code, server.notice = 0, 404, ""
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def start(server):
    """Start a callback as a trainer does.

    Returns it, the interruption and the upload that it reaches.
    """
    started = []

    def start(local_rank=0, stage="fit"):
        callback, interruption, upload = (
            SpotNotice(server.address, interval_s=0.02),
            Interruption(),
            SimpleNamespace(),
        )
        upload.expect_end = lambda seconds: setattr(upload, "seconds", seconds)
        callback.setup(
            SimpleNamespace(callbacks=[interruption, upload], local_rank=local_rank), None, stage
        )
        started.append(callback)
        return callback, interruption, upload

    yield start
    for callback in started:
        callback.teardown(None, None, "fit")


def wait_for(condition, seconds=5):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_notice_asks_for_an_interruption_and_hurries_the_upload(server, start, stage):
    _, interruption, upload = start(stage=stage)
    assert wait_for(lambda: server.asked > 3) and not interruption.reason
    server.code, server.notice = 200, NOTICE
    assert (
        wait_for(lambda: getattr(upload, "seconds", 0) == 85.0)
        and interruption.reason == "spot notice"
    )


def test_a_service_that_refuses_is_named_once_and_asked_again(server, start, capsys):
    server.code = 403
    _, interruption, _ = start()
    assert wait_for(lambda: server.asked > 3) and not interruption.reason
    server.code, server.notice = 200, NOTICE
    assert wait_for(lambda: interruption.reason == "spot notice")
    assert capsys.readouterr().out.count("No answer about spot notices") == 1


def test_one_rank_a_node_asks_during_training_alone(server, start):
    start(local_rank=1)
    callback, interruption, _ = start()
    callback.teardown(None, None, "fit")
    time.sleep(0.1)
    server.code, server.notice = 200, NOTICE
    time.sleep(0.1)
    assert not interruption.reason and server.asked <= 2


def test_no_timeout_is_the_usual_one(tmp_path):
    callback = S3Upload(tmp_path / "r", "s3://bucket/x", flush_timeout_s=None)
    callback.expect_end(1e6)
    assert callback.flush_timeout_s == 300.0
