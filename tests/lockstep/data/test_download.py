"""Downloads against a server of our own on loopback."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.data.download import download
from lockstep.runs.errors import UserError
from ranks import free_port, run_ranks

CONTENT = bytes(range(256)) * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """/file, with ranges; /no-range; /broken ends after 100 kB of the first request; /wrong has another byte."""

    def do_GET(self):
        requests = self.server.requests
        requests.append((self.path, self.headers.get("Range")))
        body, status, start = CONTENT, 200, 0
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/wrong":
            body = b"!" + CONTENT[1:]
        if self.headers.get("Range") and self.path != "/no-range":
            start, status = int(self.headers["Range"].removeprefix("bytes=").rstrip("-")), 206
            if start >= len(body):
                self.send_error(416)
                return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.path in ("/broken", "/no-range") and len(requests) == 1:
            body = body[: start + 100_000]
        self.wfile.write(body[start:])

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield server
        server.shutdown()
        thread.join()


def names(folder: Path):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_whole_and_only_once(server, tmp_path):
    target = tmp_path / "sub" / "file"
    for _ in range(2):
        assert download([f"{server.url}/file"], target, md5=MD5).read_bytes() == CONTENT
    assert server.requests == [("/file", None)]
    assert names(target.parent) == [".file.lock", "file"]


@pytest.mark.parametrize(("path", "second"), [("/broken", "bytes=100000-"), ("/no-range", "bytes=100000-")])
def test_a_cut_connection_is_continued_or_started_anew(server, tmp_path, path, second):
    assert download([server.url + path], tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert server.requests == [(path, None), (path, second)]


def test_a_part_left_by_a_killed_process_is_continued(server, tmp_path):
    (tmp_path / ".file.part").write_bytes(CONTENT[:1234])
    assert download([f"{server.url}/file"], tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert server.requests == [("/file", "bytes=1234-")]


@pytest.mark.parametrize("left", [b"not a part of it", CONTENT + b"longer"])
def test_a_part_of_something_else_is_thrown_away(server, tmp_path, left):
    (tmp_path / ".file.part").write_bytes(left)
    assert download([f"{server.url}/file"], tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert server.requests[-1] == ("/file", None)


def test_the_next_address_is_tried(server, tmp_path):
    urls = [f"{server.url}/missing", f"{server.url}/wrong", f"{server.url}/file"]
    assert download(urls, tmp_path / "file", md5=MD5).read_bytes() == CONTENT
    assert [path for path, _ in server.requests if path != "/wrong"] == ["/missing", "/file"]


def test_nothing_to_be_had_names_what_was_tried_and_what_works(server, tmp_path):
    closed = f"http://127.0.0.1:{free_port()}/file"
    with pytest.raises(UserError) as caught:
        download([f"{server.url}/missing", f"{server.url}/wrong", closed], tmp_path / "file", md5=MD5)
    message = str(caught.value)
    for part in (
        "/missing (HTTP 404)",
        "/wrong (MD5 ",
        closed,
        "refused",
        "data=digits",
        "data=synthetic",
        "data.root=",
    ):
        assert part in message
    assert names(tmp_path) == [".file.lock"]


def fetch(url, target):
    return download([url], Path(target), md5=MD5).stat().st_size


def test_ranks_of_a_node_download_once(server, tmp_path):
    sizes = run_ranks(fetch, 3, f"{server.url}/file", str(tmp_path / "file"), distributed=False)
    assert sizes == [len(CONTENT)] * 3 and server.requests == [("/file", None)]
