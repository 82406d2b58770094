"""The nodes of one run meet before any folder is made: one run id, one code, one config; without torch.

Node 0's supervisor listens on MASTER_PORT, the others call it; each says who it is, node 0 answers all of them
with the same words, and the port is free again for the ranks.
"""

import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from lockstep.distributed.cluster import Cluster
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint

log = logging.getLogger(__name__)

SPEAK_INTERVAL_S = 5.0
HELLO_WITHIN_S = 2.0  # a stranger that connects and says nothing holds the others up for no longer
LARGEST_HELLO_BYTES = 1_000_000
CLOCK_TOLERANCE_S = 60.0
FINGERPRINT = tuple(field.name for field in fields(Fingerprint))
Message = dict[str, Any]  # one line of JSON


def agree(
    cluster: Cluster,
    mine: Fingerprint,
    run_id: str | None,
    timeout_s: float,
    say: Callable[[str], None] = log.info,
    host: str | None = None,
) -> Message:
    """Node 0's answer on what all nodes share.

    Args:
        run_id: where this node was given one.
        host: this machine's name where it is another than the system's.
    Returns:
        {run_id, nodes: [{node_rank, host, clock_offset_s, …}, in node order]}.
    Raises:
        UserError: a node never came, or runs other code, another config or other packages.
    """
    hello = {
        **asdict(mine), "run_id": run_id, "host": host or socket.gethostname(), "node_rank": cluster.node_rank,
        "num_nodes": cluster.num_nodes, "time": time.time(),
    }  # fmt: skip
    if cluster.node_rank == 0:
        answer = Gathering(cluster, hello, say).answer(timeout_s)
    else:
        answer = _call(cluster, hello, timeout_s, say)
    if answer.get("error"):
        raise UserError(answer["error"])
    return answer


class Gathering:
    """Node 0's side: who has come so far, each with the connection on which it waits for the answer."""

    def __init__(self, cluster: Cluster, hello: Message, say: Callable[[str], None]) -> None:
        self.cluster, self.say = cluster, say
        self.nodes: dict[int, Message] = {0: hello}
        self.connections: dict[int, socket.socket] = {}

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.cluster.num_nodes)) - self.nodes.keys())

    def answer(self, timeout_s: float) -> Message:
        """Wait for every node and tell all of them the same: that they may start, or why not."""
        error = None
        deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
        with _listen(self.cluster.master_port or 0) as server:
            server.settimeout(0.5)
            while error is None and self.missing:
                if time.monotonic() > deadline:
                    error = self._nobody_came(timeout_s)
                elif time.monotonic() > speak_at:
                    speak_at += SPEAK_INTERVAL_S
                    self.say(f"Waiting for node rank {_names(self.missing)} of {self.cluster.num_nodes} at port "
                             f"{self.cluster.master_port} …")  # fmt: skip
                error = error or self._accept(server)
        answer = {"error": error} if error else _compare([self.nodes[rank] for rank in sorted(self.nodes)], self.say)
        for connection in self.connections.values():
            _send(connection, answer)
            connection.close()
        return answer

    def _nobody_came(self, timeout_s: float) -> str:
        where = f"{self.cluster.master_addr}:{self.cluster.master_port}"
        return (
            f"node rank {_names(self.missing)} did not arrive at {where} within {timeout_s:.0f} s: is the same command "
            "running there, with the same MASTER_PORT, and the port open?"
        )

    def _accept(self, server: socket.socket) -> str | None:
        """Take in one node, if one calls; returns what is wrong with it."""
        self._forget_the_gone()
        try:
            connection, _ = server.accept()
        except TimeoutError:
            return None
        came = _receive(connection, HELLO_WITHIN_S)
        if came is None or "node_rank" not in came:
            connection.close()
            return None
        came["clock_offset_s"] = time.time() - float(came.get("time", 0))
        rank, num_nodes = came["node_rank"], self.cluster.num_nodes
        error = None
        if came.get("num_nodes") != num_nodes or rank not in range(num_nodes):
            error = (f"{came.get('host')} came as node {rank} of {came.get('num_nodes')}, but node 0 waits for "
                     f"{num_nodes} nodes: give every node the same trainer.num_nodes.")  # fmt: skip
        elif rank in self.nodes:
            error = (f"two nodes say NODE_RANK={rank} ({self.nodes[rank]['host']} and {came['host']}): "
                     "give each node its own.")  # fmt: skip
        if error:
            _send(connection, {"error": error})
            connection.close()
            return error
        self.nodes[rank], self.connections[rank] = came, connection
        return None

    def _forget_the_gone(self) -> None:
        """A node that was stopped while it waited may come again."""
        for rank, connection in list(self.connections.items()):
            connection.setblocking(False)
            try:
                gone = connection.recv(1, socket.MSG_PEEK) == b""
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                self.say(f"Node {rank} ({self.nodes[rank]['host']}) went away; waiting for it again.")
                connection.close()
                del self.nodes[rank], self.connections[rank]


def _call(cluster: Cluster, hello: Message, timeout_s: float, say: Callable[[str], None]) -> Message:
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    where, reason = f"{cluster.master_addr}:{cluster.master_port}", "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((cluster.master_addr, cluster.master_port or 0), timeout=2) as connection:
                _send(connection, {**hello, "time": time.time()})
                answer = _receive(connection, deadline - time.monotonic() + 5)
                if answer is not None and "error" in answer:
                    return answer
                reason = "it answers, but not as node 0 of this project"
        except OSError as error:
            reason = str(error)
        if time.monotonic() > speak_at:
            say(f"Node {cluster.node_rank} waits for node 0 at {where} ({reason}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.5)
    raise UserError(
        f"node 0 did not answer at {where} within {timeout_s:.0f} s ({reason}): check MASTER_ADDR and MASTER_PORT."
    )


def _compare(nodes: list[Message], say: Callable[[str], None]) -> Message:
    first = nodes[0]
    for other in nodes[1:]:
        if abs(other.get("clock_offset_s", 0)) > CLOCK_TOLERANCE_S:
            say(
                f"The clock of node {other['node_rank']} ({other['host']}) is {other['clock_offset_s']:.0f} s off: "
                "S3 refuses requests beyond 15 minutes."
            )
        if error := _difference(other, first):
            return {"error": error}
    run_id = next((node["run_id"] for node in nodes if node["run_id"]), None)
    return {"error": None, "run_id": run_id, "nodes": nodes}


def _difference(other: Message, first: Message) -> str | None:
    who, host = f"node {other['node_rank']} ({other['host']})", first["host"]
    mine, firsts = (Fingerprint(*(node[name] for name in FINGERPRINT)) for node in (other, first))
    if error := mine.difference(firsts, who, f"node 0 ({host})"):
        return error
    if other["run_id"] and first["run_id"] and other["run_id"] != first["run_id"]:
        return f"{who} was given run_id={other['run_id']}, node 0 {first['run_id']}: give all nodes the same, or none."
    return None


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=128, reuse_port=False)
    except OSError as error:
        raise UserError(f"MASTER_PORT={port} cannot be used on node 0: {error.strerror or error}.") from None


def _send(connection: socket.socket, message: Message) -> None:
    try:
        connection.settimeout(10)
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError as error:
        log.info(f"A node went away while it was answered ({error}).")


def _receive(connection: socket.socket, within_s: float) -> Message | None:
    """One line of JSON; None where the other side is no node of ours, or says nothing."""
    data, deadline = b"", time.monotonic() + within_s
    try:
        while not data.endswith(b"\n") and len(data) < LARGEST_HELLO_BYTES:
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            part = connection.recv(65536)
            if not part:
                return None
            data += part
        message = json.loads(data)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
