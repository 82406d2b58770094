"""The rest of a copy comes by a process of its own, which ends with the one that started it; on a real S3 server."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import psutil
import pytest

from faulty_proxy import FaultyProxy
from lockstep.storage import copy_beside as module
from lockstep.storage.copy_beside import copy_beside
from lockstep.storage.local_copy import is_here, listed_copy
from object_store import shared_store
from ranks import SRC

OBJECTS = {f"{n}.jpg": os.urandom(100_000) for n in range(20)}
PARENT = """
import sys, time
from pathlib import Path
from lockstep.storage.local_copy import listed_copy
from lockstep.storage import copy_beside as module
module.SMALL = -1
copy = listed_copy(sys.argv[1], {"endpoint_url": sys.argv[2]}, Path(sys.argv[3]), {".jpg"})
module.copy_beside(copy, None)
print(*(process.pid for process in module._started), flush=True)
time.sleep(600)
"""


@pytest.fixture
def copy(tmp_path, monkeypatch):
    server = shared_store()
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    bucket, client = server.new_bucket(), server.client()
    for name, data in OBJECTS.items():
        client.put_object(Bucket=bucket, Key=f"p/{name}", Body=data)
    monkeypatch.setattr(module, "_started", [])
    monkeypatch.setattr(module, "SMALL", -1)
    return listed_copy(f"s3://{bucket}/p", {"endpoint_url": server.endpoint_url}, tmp_path, {".jpg"})


def ended():
    [process] = module._started
    assert process.wait(60) == 0
    process.stdin.close()


def come(copy):
    return {name for name in OBJECTS if is_here(copy.files / name)}


def test_it_brings_everything_and_what_is_small_is_brought_at_once(copy, monkeypatch):
    assert not copy_beside(copy, None)
    ended()
    assert {name: (copy.files / name).read_bytes() for name in OBJECTS} == OBJECTS
    assert copy_beside(copy, 0) and len(module._started) == 1, "a budget is for what is not here"
    (copy.files / "3.jpg").unlink()
    monkeypatch.setattr(module, "SMALL", 100_000)
    assert not copy_beside(copy, 1_000_000 / 2**30) and come(copy) == OBJECTS.keys() - {"3.jpg"}, "no room for all"
    module._started.pop().communicate()
    assert copy_beside(copy, None) and come(copy) == OBJECTS.keys() and len(module._started) == 1


def test_a_part_where_there_is_room_for_a_part(copy, capfd):
    copy_beside(copy, 450_000 / 2**30)
    ended()
    assert len(come(copy)) == 4
    assert "have no room here (data.cache_gib, data.cache_dir): they are read from the bucket" in capfd.readouterr().out


def test_one_process_of_the_node_fetches(copy):
    with copy.lock.open("a") as lock:
        module.fcntl.flock(lock, module.fcntl.LOCK_EX)
        copy_beside(copy, None)
    assert not module._started


def test_who_needs_all_of_it_waits_for_who_fetches(copy, caplog):
    with copy.lock.open("a") as lock, ThreadPoolExecutor(1) as pool, caplog.at_level("INFO"):
        module.fcntl.flock(lock, module.fcntl.LOCK_EX)
        whole = pool.submit(copy.complete)
        until = time.monotonic() + 10
        while "Another process copies" not in caplog.text and time.monotonic() < until:
            time.sleep(0.01)
        assert not whole.done() and not come(copy)
        module.fcntl.flock(lock, module.fcntl.LOCK_UN)
        whole.result(60)
    assert come(copy) == {*OBJECTS} and f"Another process copies {copy.uri}: waiting for it" in caplog.text


def test_it_ends_with_who_started_it_however_that_ends(copy):
    with FaultyProxy(urlsplit(copy.options.endpoint_url).port) as proxy:
        command = [sys.executable, "-c", PARENT, copy.uri, proxy.endpoint_url, str(copy.folder.parent)]
        environment = {**os.environ, "PYTHONPATH": str(SRC)}
        parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        child = psutil.Process(int(parent.stdout.readline()))
        proxy.be("away")  # by itself it would go on trying for minutes
        parent.kill()
        parent.wait()
        parent.stdout.close()
        psutil.wait_procs([child], 30)
        assert not child.is_running()


def test_a_copy_that_cannot_go_on_is_a_warning(copy, monkeypatch, capfd):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    copy_beside(copy, None)
    ended()
    assert not come(copy)
    said = capfd.readouterr()
    assert "cannot be read" in said.out + said.err and "What is not here is read from the bucket" in said.out + said.err
