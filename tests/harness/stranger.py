"""Another user of a run's machine: finds every port that listens and says anything to it, to run code as that run's.

Beside a run of one machine it is forked, in a network of its own with the run, from the run's first process:

    run_door("train", …, before=functools.partial(invite, report, canaries, seed, KINDS))

Beside two hosts it is a script, which root starts and which gives its rights away:

    python tests/harness/stranger.py <canaries> <seed> <kind> …

It writes down the kind of each try. Whoever reads one of its pickles leaves a file in the folder of the canaries.
"""

import contextlib
import ctypes
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

NOBODY = 65534
CROWD = 6
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
LISTENS = "0A"
HELLO = (
    b'{"tree_hash": "", "config_hash": "", "versions": {}, "run_id": "x", "host": "h", "node_rank": 1, "num_nodes": 2'
)
KINDS: dict[str, Callable[["Stranger", str, int], None]] = {}


def kind(function: Callable[["Stranger", str, int], None]) -> Callable[["Stranger", str, int], None]:
    KINDS[function.__name__] = function
    return function


class Canary:
    """Whoever unpickles it runs a command as himself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.folder}/$(id -u)-$$",)


class Stranger:
    """
    Args:
        canaries: a folder that the run's user can write.
        report: where the kind of each try goes, one a line.
    """

    def __init__(self, canaries: str, seed: int, kinds: list[str], report: Any) -> None:
        self.canaries, self.kinds, self.report = canaries, kinds, report
        self.chance = random.Random(seed)
        self.held: list[socket.socket] = []  # connections that stay open and say nothing

    def _multiply(self) -> None:
        """Into CROWD processes, each with chances of its own, that end with the first."""
        for number in range(1, CROWD):
            if os.fork() == 0:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                self.chance = random.Random(f"{self.chance.random()} {number}")
                return

    @property
    def pickle(self) -> bytes:
        return pickle.dumps(Canary(self.canaries))

    def work(self) -> None:
        """Until somebody ends it. A port is tried as soon as it is there: the first words there count most."""
        self._multiply()
        before: set[tuple[str, int]] = set()
        while True:
            found = listening()
            fresh, before = found - before, found
            for address, port in [*sorted(fresh), *sorted(found)]:
                name = self.chance.choice(self.kinds)
                with contextlib.suppress(OSError, RuntimeError, ValueError, UnicodeDecodeError):
                    KINDS[name](self, address, port)
                print(name, file=self.report, flush=True)
            del self.held[: max(0, len(self.held) - 100)]
            time.sleep(0.002)

    def connect(self, address: str, port: int) -> socket.socket:
        return socket.create_connection((address, port), timeout=0.5)

    def say(self, address: str, port: int, words: bytes, stay: bool = False) -> bytes:
        """Say it, and return what comes back within a moment."""
        connection = self.connect(address, port)
        connection.settimeout(0.05)
        answer = b""
        with contextlib.suppress(OSError):
            connection.sendall(words)
            answer = connection.recv(1000)
        self.held.append(connection) if stay else connection.close()
        return answer

    def store(self, address: str, port: int) -> Any:
        """The store at this port, where it is one, as torch itself connects to it."""
        import torch.distributed as dist

        if self.say(address, port, b"") != b"":
            raise ValueError("it speaks first")
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))


def listening() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket in this network that waits, as any user can read them."""
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        local, state = line.split()[1], line.split()[3]
        if state == LISTENS:
            address, port = local.split(":")
            found.add((socket.inet_ntoa(bytes.fromhex(address)[::-1]).replace("0.0.0.0", "127.0.0.1"), int(port, 16)))
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        if line.split()[3] == LISTENS:
            found.add(("127.0.0.1", int(line.split()[1].split(":")[1], 16)))
    return found


@kind
def garbage(self: Stranger, address: str, port: int) -> None:
    self.say(address, port, self.chance.randbytes(self.chance.choice([1, 8, 100, 5000])), stay=True)


@kind
def half_line(self: Stranger, address: str, port: int) -> None:
    self.say(address, port, self.chance.choice([b"{", b'{"time": ', b"0" * 32 + b" - ", b"\n" * 50]), stay=True)


@kind
def huge_line(self: Stranger, address: str, port: int) -> None:
    self.say(address, port, b"x" * 3_000_000)


@kind
def silence(self: Stranger, address: str, port: int) -> None:
    self.held.append(self.connect(address, port))


@kind
def pickled(self: Stranger, address: str, port: int) -> None:
    self.say(address, port, self.chance.choice([b"", len(self.pickle).to_bytes(8, "little")]) + self.pickle)


@kind
def hello(self: Stranger, address: str, port: int) -> None:
    """Of node 1, with values of other types, and a proof that is none."""
    time_ = self.chance.choice([b"0", b'"now"', b"[" * 2000 + b"]" * 2000, b"null", b"1e999", b"true"])
    proof = self.chance.choice([b"-", b"0" * 64, b"refused"])
    body = HELLO + b', "time": ' + time_ + b"}"
    self.say(address, port, self.chance.choice([body, b"0" * 32 + b" " + proof + b" " + body]) + b"\n", stay=True)


@kind
def places_of_gloo(self: Stranger, address: str, port: int) -> None:
    """The numbers by which gloo knows a pair's connection, then a message that claims to be large."""
    number = self.chance.randrange(8).to_bytes(8, "little")
    self.say(address, port, number + self.chance.choice([b"", b"\xff" * 64, bytes(64)]), stay=True)


@kind
def keys_before_the_ranks(self: Stranger, address: str, port: int) -> None:
    store = self.store(address, port)
    start = start_of(store)
    keys = ["lockstep/join/start", f"lockstep/join/{start}/1", f"lockstep/join/{start}/all"]
    keys += [f"lockstep/{start}/group/0//cpu//0/{rank}" for rank in (0, 1)]
    keys += [f"lockstep/{start}/watch/{name}" for name in ("beat/0", "beat/1", "error", "stop")]
    for key in keys:
        if not store.check([key]):
            store.set(key, self.chance.choice([self.pickle, b"", b"[" * 3000, b'[["a", "b"], "x"]']))


@kind
def other_values(self: Stranger, address: str, port: int) -> None:
    """What stands under one key, changed, under another or gone."""
    store = self.store(address, port)
    keys = [key for key in store.list_keys() if key.startswith("lockstep/")]
    if not keys:
        return
    one, two = self.chance.choice(keys), self.chance.choice(keys)
    value = store.get(two)
    match self.chance.randrange(4):
        case 0:
            store.set(one, value)
        case 1:
            store.set(one, bytes([value[0] ^ 1]) + value[1:])
        case 2:
            store.set(one, self.pickle)
        case 3:
            store.delete_key(one)


@kind
def as_a_rank(self: Stranger, address: str, port: int) -> None:
    """Take part as rank 1: its number in the rendezvous over and over, then gloo, and a pickle for whoever asks."""
    import torch.distributed as dist

    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1))
    began, start = time.monotonic(), ""
    while time.monotonic() < began + (3 if start else 1) and not _all_met(store, start):
        start = start_of(store)
        if start:
            store.set(f"lockstep/join/{start}/1", b"0" * 16)
    if not start:
        return
    child = os.fork()
    if child == 0:
        try:
            _take_part(address, port, start, Canary(self.canaries))
        finally:
            os._exit(0)
    deadline = time.monotonic() + 6
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.02)


def _all_met(store: Any, start: str) -> bool:
    return bool(start) and store.check([f"lockstep/join/{start}/all"])


def _take_part(address: str, port: int, start: str, canary: Canary) -> None:
    import torch.distributed as dist

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    store = dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
    group = dist.PrefixStore(f"lockstep/{start}/group", store)
    dist.init_process_group("gloo", store=group, rank=1, world_size=2, timeout=timedelta(seconds=3))
    for _ in range(3):
        dist.all_gather_object([None, None], canary)


def start_of(store: Any) -> str:
    """The name of this start, where rank 0 has written it; what follows it is a tag."""
    key = "lockstep/join/start"
    return store.get(key).decode(errors="replace")[:16] if store.check([key]) else ""


def invite(report: str, canaries: str, seed: int, kinds: list[str]) -> None:
    """In a run's first process: a network for it and all that it starts, and a stranger in it. Needs root."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if os.fork() == 0:
        try:
            with open(report, "a") as file:
                os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
                become_nobody()
                Stranger(canaries, seed, kinds, file).work()
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(0)


def become_nobody() -> None:
    """Give all rights away, and end with whoever started this process."""
    import torch.distributed as dist

    socket.getaddrinfo("127.0.0.1", 1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.all_gather_object([None], "rehearsed")  # what this imports nobody could read any more
    dist.destroy_process_group()
    del store
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    become_nobody()
    print("ready", flush=True)
    Stranger(sys.argv[1], int(sys.argv[2]), sys.argv[3:] or list(KINDS), sys.stdout).work()
