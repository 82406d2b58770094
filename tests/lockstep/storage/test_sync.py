"""A prefix of a bucket on this disk: whole, resumed, and as the bucket is now.

Against a real S3 server.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lockstep.process.errors import UserError
from lockstep.storage import sync as module
from lockstep.storage.sync import RemoteFile, sync
from object_store import FaultyProxy, shared_store

SRC = Path(__file__).resolve().parents[3] / "src"
OBJECTS = {f"photos/ä {n % 3}+/{n}.jpg": os.urandom(1000 + n) for n in range(60)} | {
    "photos/large": os.urandom(2**22)
}


@pytest.fixture
def place(monkeypatch):
    server = shared_store()
    for variable, value in server.environment().items():
        monkeypatch.setenv(variable, value)
    name, client = server.new_bucket(), server.client()
    for key, data in {**OBJECTS, "photos-of-others/x": b"1", "photos/folder/": b""}.items():
        client.put_object(Bucket=name, Key=key, Body=data)
    return f"s3://{name}/photos", {"endpoint_url": server.endpoint_url}, client, name


def found(folder):
    return {
        f"photos/{path.relative_to(folder)}": path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_copy_is_as_the_bucket_is_now(place, tmp_path, caplog, monkeypatch):
    uri, s3, client, name = place
    caplog.set_level("INFO")
    folder = sync(uri, tmp_path, s3)
    assert found(folder) == OBJECTS and "61 files" in caplog.text
    assert sync(f"{uri}/large", tmp_path / "one", s3).read_bytes() == OBJECTS["photos/large"], (
        "of one object the file"
    )
    caplog.clear()
    assert sync(uri + "/", tmp_path, s3) == folder and caplog.text == "", "nothing is fetched twice"

    client.put_object(Bucket=name, Key="photos/new.jpg", Body=b"new")
    client.put_object(Bucket=name, Key="photos/large", Body=b"smaller")
    client.delete_object(Bucket=name, Key="photos/ä 0+/0.jpg")
    (folder / "ä 1+/1.jpg").unlink()
    (folder / "ä 2+/2.jpg").write_bytes(b"cut")
    now = {**OBJECTS, "photos/new.jpg": b"new", "photos/large": b"smaller"}
    del now["photos/ä 0+/0.jpg"]
    assert found(sync(uri, tmp_path, s3)) == now and "4 files" in caplog.text


def test_a_folder_that_left_the_bucket_leaves_the_copy(place, tmp_path):
    uri, s3, client, name = place
    folder = sync(uri, tmp_path, s3)
    for key in OBJECTS:
        if key.startswith("photos/ä 0+/"):
            client.delete_object(Bucket=name, Key=key)
    sync(uri, tmp_path, s3)
    assert not (folder / "ä 0+").exists() and (folder / "ä 1+").exists()
    # A file takes the name of a folder.
    client.put_object(Bucket=name, Key="photos/ä 0+", Body=b"file")
    assert (sync(uri, tmp_path, s3) / "ä 0+").read_bytes() == b"file"


def test_a_part_of_another_node_stays_while_it_is_new(place, tmp_path):
    uri, s3, _, _ = place
    folder = sync(uri, tmp_path, s3)
    new = folder / ".0.another.part"
    old = folder / ".1.another.part"
    own = folder / f".2.{socket.gethostname()}.part"
    for path in (new, old, own):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    sync(uri, tmp_path, s3)
    assert (new.exists(), old.exists(), own.exists()) == (True, False, False)


def test_marks_are_times_of_every_file_system():
    assert all(RemoteFile("k", 1, str(n)).mtime_s < 2**31 for n in range(100))


CHILD = """
import sys; from pathlib import Path
from lockstep.storage import sync as module
fetch = module._fetch_file
def slow(bucket, key, *rest):
    import time; time.sleep(0.2); fetch(bucket, key, *rest)
module._fetch_file, module.THREADS = slow, 2
module.sync(sys.argv[1], Path(sys.argv[2]), {"endpoint_url": sys.argv[3]})
"""


def test_a_killed_copy_goes_on_where_it_was(place, tmp_path, monkeypatch, caplog):
    uri, s3, _, _ = place
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, uri, str(tmp_path), s3["endpoint_url"]], env=environment
    )
    deadline = time.monotonic() + 60
    while len(list(tmp_path.rglob("*.jpg"))) < 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jpg")}
    assert 20 <= len(before) < 60
    caplog.set_level("INFO")
    assert found(sync(uri, tmp_path, s3)) == OBJECTS
    assert (
        sum(path.stat().st_mtime_ns == time_ns for path, time_ns in before.items())
        >= len(before) - 2
    )


def test_a_connection_that_breaks_is_tried_again(place, tmp_path, monkeypatch):
    uri, s3, _, _ = place
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    with FaultyProxy(urlsplit(s3["endpoint_url"]).port) as proxy:
        assert found(sync(uri, tmp_path, {"endpoint_url": proxy.endpoint_url})) == OBJECTS


def test_what_cannot_be_copied_is_a_sentence(place, tmp_path, monkeypatch):
    uri, s3, client, name = place
    with pytest.raises(UserError, match="there is nothing under this prefix"):
        sync(f"{uri}/nothing", tmp_path, s3)
    with pytest.raises(UserError, match="cannot be read: the bucket no-such-bucket does not exist"):
        sync("s3://no-such-bucket/x", tmp_path, s3)
    Usage = namedtuple("Usage", "free")
    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "disk_usage", lambda _: Usage(1000))
        with pytest.raises(
            UserError, match="give data.cache_dir=FOLDER on a larger disk, or mount the bucket"
        ):
            sync(uri, tmp_path, s3)
    monkeypatch.setattr(
        module.Bucket, "list", lambda self, beginning="": iter([("../../evil", 1, "x")])
    )
    with pytest.raises(UserError, match="holds the key '../../evil', which cannot be a file"):
        sync(uri, tmp_path, s3)
    assert not (tmp_path.parent / "evil").exists()
