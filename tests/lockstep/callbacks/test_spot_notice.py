"""Spot notices from a metadata server of the test's own, on loopback."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.spot_notice import SpotNotice

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
        assert self.path == "/latest/api/token" and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
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
    """Start a callback as a trainer does; returns it, the interruption and the upload that it reaches."""
    started = []

    def start(local_rank=0, stage="fit"):
        callback, interruption, upload = SpotNotice(server.address, interval_s=0.02), Interruption(), SimpleNamespace()
        upload.expect_end = lambda seconds: setattr(upload, "seconds", seconds)
        callback.setup(SimpleNamespace(callbacks=[interruption, upload], local_rank=local_rank), None, stage)
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
    assert wait_for(lambda: getattr(upload, "seconds", 0) == 85.0) and interruption.reason == "spot notice"


def test_a_service_that_refuses_is_named_once_and_asked_again(server, start, capsys):
    server.code = 403
    _, interruption, _ = start()
    assert wait_for(lambda: server.asked > 3) and not interruption.reason
    server.code, server.notice = 200, NOTICE
    assert wait_for(lambda: interruption.reason == "spot notice")
    assert capsys.readouterr().out.count("No answer about spot notices") == 1


def test_one_rank_of_a_node_asks_and_none_after_the_training(server, start):
    start(local_rank=1)
    callback, interruption, _ = start()
    callback.teardown(None, None, "fit")
    time.sleep(0.1)
    server.code, server.notice = 200, NOTICE
    time.sleep(0.1)
    assert not interruption.reason and server.asked <= 2
