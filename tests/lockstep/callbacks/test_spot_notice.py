"""Spot notices from a metadata server of the test's own, on loopback."""

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from lockstep.callbacks.interruption import Interruption
from lockstep.callbacks.spot_notice import MetadataService, SpotNotice

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
        state = self.server.state
        assert (
            self.path == "/latest/api/token" and 0 < int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) <= 21600
        )
        if state.hang:
            return state.hang.wait(10)
        state.tokens += 1
        self._answer(200 if state.code != 403 else 403, f"token-{state.tokens}")

    def do_GET(self):
        state = self.server.state
        assert self.path == "/latest/meta-data/spot/instance-action"
        state.asked += 1
        if self.headers.get("X-aws-ec2-metadata-token") != f"token-{state.tokens}":
            return self._answer(401)
        if state.code != 200:
            return self._answer(state.code)
        return self._answer(200, state.notice) if state.notice else self._answer(404)


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.state = SimpleNamespace(tokens=0, asked=0, code=200, notice=None, hang=None)
    server.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_no_notice_is_404_and_one_token_serves_many_polls(server):
    service = MetadataService(server.address)
    assert [service.notice() for _ in range(3)] == [None, None, None]
    assert (server.state.tokens, server.state.asked) == (1, 3)


def test_a_notice_is_its_text(server):
    server.state.notice = NOTICE
    assert MetadataService(server.address).notice() == NOTICE


def test_an_expired_token_is_renewed(server):
    service = MetadataService(server.address)
    service.notice()
    server.state.tokens += 1  # the server has forgotten the old one
    server.state.notice = NOTICE
    assert service.notice() == NOTICE


@pytest.mark.parametrize("code", [403, 500])
def test_a_service_that_refuses_is_an_error_not_a_notice(server, code):
    server.state.code = code
    with pytest.raises(OSError, match=str(code)):
        MetadataService(server.address).notice()


def test_a_service_that_hangs_is_given_up(server):
    server.state.hang = threading.Event()
    began = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        MetadataService(server.address, timeout_s=0.3).notice()
    assert time.monotonic() - began < 5
    server.state.hang.set()


class Upload:
    seconds = None

    def expect_end(self, seconds):
        self.seconds = seconds


def watched(callback, local_rank=0, stage="fit"):
    """The interruption and the upload that the callback would reach in a trainer."""
    interruption, upload = Interruption(), Upload()
    trainer = SimpleNamespace(callbacks=[interruption, upload, callback], local_rank=local_rank)
    callback.setup(trainer, None, stage)
    return interruption, upload


def wait_for(condition, seconds=5):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_a_notice_asks_for_an_interruption_and_hurries_the_upload(server):
    callback = SpotNotice(server.address, interval_s=0.05)
    interruption, upload = watched(callback)
    assert wait_for(lambda: server.state.asked > 2) and interruption.reason is None
    server.state.notice = NOTICE
    assert wait_for(lambda: interruption.reason == "spot notice")
    assert wait_for(lambda: upload.seconds == 85.0)
    assert time.time() - callback.record_fields()["spot_notice_at"] < 5
    callback.teardown(None, None, "fit")


def test_a_service_that_is_not_there_is_said_once_and_asked_again(capsys):
    answers = iter([OSError("no route"), http.client.BadStatusLine("no HTTP"), None, "now"])

    def fetch():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    callback = SpotNotice(interval_s=0.01, fetch=fetch)
    interruption, _ = watched(callback)
    assert wait_for(lambda: interruption.reason == "spot notice")
    callback.teardown(None, None, "fit")
    assert capsys.readouterr().out.count("No spot notices can be had") == 1


def test_a_notice_during_the_test_counts_too():
    notice = []
    callback = SpotNotice(interval_s=0.01, fetch=lambda: notice[0] if notice else None)
    before, _ = watched(callback)
    callback.teardown(None, None, "fit")
    interruption, upload = watched(callback, stage="test")
    notice.append("now")
    assert wait_for(lambda: interruption.reason == "spot notice" and upload.seconds is not None)
    assert before.reason is None, "the thread of the training has ended"
    callback.teardown(None, None, "test")


def test_one_rank_of_a_node_asks():
    callback = SpotNotice(interval_s=0.01, fetch=lambda: "now")
    interruption, _ = watched(callback, local_rank=1)
    time.sleep(0.1)
    assert interruption.reason is None


def test_what_is_not_done_in_time_is_ended(monkeypatch):
    codes = []
    monkeypatch.setattr("lockstep.callbacks.spot_notice.os._exit", codes.append)
    watched(SpotNotice(interval_s=0.01, end_after_s=0.1, fetch=lambda: "now"))
    assert wait_for(lambda: codes == [75])
