"""What nodes say to each other when they meet: lines of three words, and the types that their JSON is read into.

A line is a nonce, a dash and JSON, which is read into declared types only. Imports no torch.
"""

import contextlib
import json
import re
import socket
import time
from dataclasses import dataclass, field

from lockstep.runs.provenance import Fingerprint
from lockstep.runs.typed_json import Part, from_json, to_json

LARGEST_HELLO_BYTES = 65_536
LARGEST_ANSWER_BYTES = 16_000_000  # holds the hellos of all nodes
NO_PROOF = b"-"
LINE = re.compile(rb"([0-9a-f]{32}) (-) (.*)", re.DOTALL)
NO_HOST_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(kw_only=True)
class Hello(Part):
    """Who a node is, and what it runs.

    Attributes:
        time: of its clock, seconds since 1970.
        clock_offset_s: by node 0's clock; what a node says of it does not count.
    """

    tree_hash: str = ""
    config_hash: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    run_id: str | None = None
    host: str = ""
    node_rank: int = -1
    num_nodes: int = 0
    time: float = 0.0
    clock_offset_s: float = 0.0

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.tree_hash, self.config_hash, self.versions)


@dataclass(kw_only=True)
class Answer(Part):
    """What node 0 tells all nodes: what they share, or why they cannot start."""

    error: str | None = None
    run_id: str | None = None
    nodes: list[Hello] = field(default_factory=list)  # in node order


def read_hello(body: bytes) -> Hello | None:
    """None where it is none: everything but the clock's offset has to be there."""
    try:
        values = json.loads(body)
        complete = isinstance(values, dict) and set(to_json(Hello())) - {"clock_offset_s"} <= values.keys()
        hello = from_json(Hello, values) if complete else None
    except (ValueError, RecursionError):
        return None
    if hello:
        hello.host = NO_HOST_NAME.sub("?", hello.host)[:253]
    return hello


def send(connection: socket.socket, nonce: bytes, proof: bytes, body: bytes) -> bool:
    """Whether the other side is still there."""
    with contextlib.suppress(OSError):
        connection.sendall(nonce + b" " + proof + b" " + body + b"\n")
        return True
    return False


def receive(connection: socket.socket, deadline: float, most_bytes: int) -> tuple[bytes, bytes, bytes]:
    """One line's nonce, proof and JSON.

    Raises:
        OSError, ValueError: it went away, says nothing, or something else.
    """
    data = bytearray()
    while not data.endswith(b"\n"):
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        part = connection.recv(65_536)
        if not part or len(data) > most_bytes:
            raise ValueError("it answers, but not as node 0 of this project")
        data += part
    if (match := LINE.fullmatch(bytes(data[:-1]))) is None:
        raise ValueError("it answers, but not as node 0 of this project")
    return match[1], match[2], match[3]
