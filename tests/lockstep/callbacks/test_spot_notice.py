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
    """IMDSv2: a PUT gives a token, a GET without a valid one is refused."""

    def log_message(self, *_):
        pass

    def _answer(self, code, body=""):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_PUT(self):
        assert self.path == "/latest/api/token" and int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        self.server.tokens += 1
        self._answer(200, f"token-{self.server.tokens}")

    def do_GET(self):
        assert self.path == "/latest/meta-data/spot/instance-action"
        self.server.asked += 1
        if self.headers.get("X-aws-ec2-metadata-token") != f"token-{self.server.tokens}":
            return self._answer(401)
        if self.server.code != 200:
            return self._answer(self.server.code)
        return self._answer(200, self.server.notice) if self.server.notice else self._answer(404)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.tokens, server.asked, server.code, server.notice = 0, 0, 200, None
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
    server.notice = NOTICE
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
    server.notice = NOTICE
    time.sleep(0.1)
    assert not interruption.reason and server.asked <= 2
