"""The S3 server of the tests leaves nothing behind, whether it is stopped or killed."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from object_store import object_store, remove_dead_folders, remove_dead_sockets


def sockets_of(store):
    ports = [port + offset for port in store.ports for offset in (0, 10000)]
    return [path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock")]


@pytest.mark.slow
def test_a_stopped_and_a_killed_server_leave_no_socket(tmp_path):
    with object_store(tmp_path) as store:
        assert sockets_of(store)
        store.kill()
        assert not sockets_of(store)
        store.start()
        assert sockets_of(store)
    assert not sockets_of(store)


def test_only_sockets_that_nobody_listens_to_go(tmp_path):
    with socket.socket(socket.AF_UNIX) as living, socket.socket(socket.AF_UNIX) as dead:
        for server, name in ((living, "living"), (dead, "dead")):
            server.bind(str(tmp_path / f"seaweedfs-{name}.sock"))
            server.listen()
        dead.close()
        remove_dead_sockets(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["seaweedfs-living.sock"]


KILLED = """
import sys, time
sys.path[:0] = sys.argv[1:]
import object_store
store = object_store.shared_store()
print(store.folder, store.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_test_run_leaves_no_server_and_the_next_one_tidies_its_files():
    paths = [str(Path(__file__).parents[1] / "src"), str(Path(__file__).parent / "harness")]
    run = subprocess.Popen([sys.executable, "-c", KILLED, *paths], stdout=subprocess.PIPE, text=True)
    folder, _, pid = run.stdout.readline().strip().rpartition(" ")
    os.kill(run.pid, signal.SIGKILL)
    run.communicate()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists() and Path(folder).is_dir()
    remove_dead_folders()
    assert not Path(folder).exists()
