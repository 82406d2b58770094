"""The nodes of one run meet before any folder is made: one run id, one code, one config; without torch.

Node 0's supervisor listens on MASTER_PORT, the others call it; each says who it is, node 0 answers all of them
with the same words, and the port is free again for the ranks.
"""

import json
import socket
import time
from collections.abc import Callable
from typing import Any

from cluster import Cluster
from errors import UserError

SPEAK_INTERVAL_S = 5.0
LARGEST_HELLO_BYTES = 1_000_000
CLOCK_TOLERANCE_S = 60.0


def agree(
    cluster: Cluster, mine: dict[str, Any], timeout_s: float, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Node 0's words on what all nodes share.

    Args:
        mine: {run_id or None, host, tree_hash, config_hash, versions}.
    Returns:
        {run_id, nodes: [each node's `mine`, in node order]}.
    Raises:
        UserError: a node never came, or runs other code, another config or other packages.
    """
    hello = {**mine, "node_rank": cluster.node_rank, "time": time.time()}
    answer = _gather(cluster, hello, timeout_s, say) if cluster.node_rank == 0 else _call(cluster, hello, timeout_s, say)
    if answer.get("error"):
        raise UserError(answer["error"])
    return answer


def _gather(cluster: Cluster, hello: dict[str, Any], timeout_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    nodes, connections = {0: hello}, []
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    with _listen(cluster.master_port or 0) as server:
        while len(nodes) < cluster.num_nodes:
            missing = sorted(set(range(cluster.num_nodes)) - nodes.keys())
            if time.monotonic() > deadline:
                answer = {"error": f"node rank {_names(missing)} did not arrive at {cluster.master_addr}:"
                                   f"{cluster.master_port} within {timeout_s:.0f} s: is the same command running there, "
                                   "with the same MASTER_PORT, and the port open?"}  # fmt: skip
                break
            if time.monotonic() > speak_at:
                say(f"Waiting for node rank {_names(missing)} of {cluster.num_nodes} at port {cluster.master_port} …")
                speak_at += SPEAK_INTERVAL_S
            server.settimeout(0.5)
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            came = _receive(connection)
            if came is None:
                connection.close()
                continue
            came["clock_offset_s"] = time.time() - came["time"]
            connections.append(connection)
            if came["node_rank"] in nodes:
                answer = {"error": f"two nodes say NODE_RANK={came['node_rank']} ({nodes[came['node_rank']]['host']} and "
                                   f"{came['host']}): give each node its own."}  # fmt: skip
                break
            nodes[came["node_rank"]] = came
        else:
            answer = _compare([nodes[rank] for rank in range(cluster.num_nodes)], say)
        for connection in connections:
            _send(connection, answer)
            connection.close()
    return answer


def _call(cluster: Cluster, hello: dict[str, Any], timeout_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    where, reason = f"{cluster.master_addr}:{cluster.master_port}", "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((cluster.master_addr, cluster.master_port or 0), timeout=2) as connection:
                _send(connection, {**hello, "time": time.time()})
                connection.settimeout(max(1.0, deadline - time.monotonic() + 5))
                answer = _receive(connection)
                if answer is not None:
                    return answer
                reason = "it answers, but not as node 0 of this project"
        except OSError as error:
            reason = str(error)
        if time.monotonic() > speak_at:
            say(f"Node {cluster.node_rank} waits for node 0 at {where} ({reason}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.5)
    raise UserError(f"node 0 did not answer at {where} within {timeout_s:.0f} s ({reason}): check MASTER_ADDR and MASTER_PORT.")


def _compare(nodes: list[dict[str, Any]], say: Callable[[str], None]) -> dict[str, Any]:
    first = nodes[0]
    for other in nodes[1:]:
        who = f"node {other['node_rank']} ({other['host']})"
        if abs(other.get("clock_offset_s", 0)) > CLOCK_TOLERANCE_S:
            say(f"The clock of {who} is {other['clock_offset_s']:.0f} s off: S3 refuses requests beyond 15 minutes.")
        for key, what in (("tree_hash", "code in src, configs or requirements.txt"), ("config_hash", "options")):
            if other[key] != first[key]:
                return {"error": f"{who} runs with other {what} than node 0 ({first['host']}): make them equal on all nodes."}
        for name, version in first["versions"].items():
            if other["versions"].get(name) != version:
                return {"error": f"{who} has {name} {other['versions'].get(name)}, node 0 has {version}: run make install there."}
        if other["run_id"] and first["run_id"] and other["run_id"] != first["run_id"]:
            return {"error": f"{who} was given run_id={other['run_id']}, node 0 {first['run_id']}: give all the same, or none."}
    return {"error": None, "run_id": first["run_id"], "nodes": nodes}


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=128, reuse_port=False)
    except OSError as error:
        raise UserError(f"MASTER_PORT={port} cannot be used on node 0: {error.strerror or error}.") from None


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError as error:
        print(f"A node went away while it was answered ({error}).")


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """One line of JSON; None where the other side is no node of ours."""
    data = b""
    try:
        if connection.gettimeout() is None:
            connection.settimeout(5)
        while not data.endswith(b"\n") and len(data) < LARGEST_HELLO_BYTES:
            part = connection.recv(65536)
            if not part:
                return None
            data += part
        message = json.loads(data)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) and ("node_rank" in message or "error" in message) else None
