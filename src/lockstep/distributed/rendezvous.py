"""The nodes of one run meet before any folder is made: one run id, one code, one config; without torch.

Node 0's supervisor listens on MASTER_PORT, the others call it; each says who it is, node 0 answers all of them
with the same words, and the port is free again for the ranks. What is said is in meeting_lines.py:

    node 0 → caller    its nonce, -, {}
    caller → node 0    its nonce, -, who it is
    node 0 → caller    its nonce, -, the answer
"""

import json
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import asdict

from lockstep.distributed.cluster import Cluster, listen
from lockstep.distributed.meeting_lines import (
    LARGEST_ANSWER_BYTES,
    LARGEST_HELLO_BYTES,
    LINE,
    NO_PROOF,
    Answer,
    Hello,
    read_hello,
    receive,
    send,
)
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint
from lockstep.runs.typed_json import WrongValue, from_json, to_json

log = logging.getLogger(__name__)

SPEAK_INTERVAL_S = 5.0
HELLO_WITHIN_S = 5.0
GREETING_WITHIN_S = 5.0
MOST_CALLERS = 256  # that have not proved themselves; the oldest goes when another comes
CLOCK_TOLERANCE_S = 60.0


def agree(
    cluster: Cluster,
    mine: Fingerprint,
    run_id: str | None,
    timeout_s: float,
    say: Callable[[str], None] = log.info,
    host: str | None = None,
) -> Answer:
    """Node 0's answer on what all nodes share.

    Args:
        run_id: where this node was given one.
        host: this machine's name where it is another than the system's.
    Raises:
        UserError: a node never came, has another secret, or runs other code, another config or other packages.
    """
    hello = Hello(
        **asdict(mine), run_id=run_id, host=host or socket.gethostname(), node_rank=cluster.node_rank,
        num_nodes=cluster.num_nodes, time=time.time(),
    )  # fmt: skip
    if cluster.node_rank == 0:
        answer = Gathering(cluster, hello, say).answer(timeout_s)
    else:
        answer = _call(cluster, hello, timeout_s, say)
    if answer.error:
        raise UserError(answer.error)
    return answer


class Caller:
    """One connection to node 0, from its first byte until it has said who it is."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address = connection, address
        self.data = b""
        self.nonce = secrets.token_hex(16).encode()  # node 0's
        self.theirs = b""
        self.since = time.monotonic()

    def whole_line(self) -> bytes | None:
        """What it has sent, once that is a line; None: more may come.

        Raises:
            OSError, ValueError: it has gone, or sends too much.
        """
        part = self.connection.recv(65_536)
        self.data += part
        if not part or len(self.data) > LARGEST_HELLO_BYTES:
            raise ValueError
        return self.data[:-1] if self.data.endswith(b"\n") else None


class Gathering:
    """Node 0's side: who has come so far, each with the connection on which it waits for the answer."""

    def __init__(self, cluster: Cluster, hello: Hello, say: Callable[[str], None]) -> None:
        self.cluster, self.say = cluster, say
        self.nodes: dict[int, Hello] = {0: hello}
        self.callers: dict[int, Caller] = {}  # by node
        self.strangers: dict[socket.socket, Caller] = {}  # have not said who they are; the oldest first

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.cluster.num_nodes)) - self.nodes.keys())

    def answer(self, timeout_s: float) -> Answer:
        """Wait for every node and tell all of them the same: that they may start, or why not."""
        with _listen(self.cluster) as server, selectors.DefaultSelector() as ready:
            server.setblocking(False)
            ready.register(server, selectors.EVENT_READ)
            try:
                error = self._wait(server, ready, timeout_s)
            finally:
                for connection in self.strangers:
                    connection.close()
        nodes = [self.nodes[rank] for rank in sorted(self.nodes)]
        answer = Answer(error=error) if error else _compare(nodes, self.say)
        for caller in self.callers.values():
            self._tell(caller, answer)
        return answer

    def _wait(self, server: socket.socket, ready: selectors.BaseSelector, timeout_s: float) -> str | None:
        """Until all nodes are here; returns what is wrong."""
        deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
        error = None
        while error is None and self.missing:
            if time.monotonic() > deadline:
                return self._nobody_came(timeout_s)
            if time.monotonic() > speak_at:
                speak_at += SPEAK_INTERVAL_S
                self.say(f"Waiting for node rank {_names(self.missing)} of {self.cluster.num_nodes} at port "
                         f"{self.cluster.master_port} …")  # fmt: skip
            self._forget_the_gone()
            self._dismiss_the_silent(ready)
            for key, _ in ready.select(0.5):
                if key.fileobj is server:
                    self._take_in(server, ready)
                elif key.fileobj in self.strangers and error is None:
                    error = self._hear(self.strangers[key.fileobj], ready)
        return error

    def _nobody_came(self, timeout_s: float) -> str:
        where = f"{self.cluster.master_addr}:{self.cluster.master_port}"
        return (
            f"node rank {_names(self.missing)} did not arrive at {where} within {timeout_s:.0f} s: is the same command "
            f"running there, with the same MASTER_PORT, and the port open?"
        )

    def _take_in(self, server: socket.socket, ready: selectors.BaseSelector) -> None:
        """A new connection, which gets our nonce to prove itself over."""
        try:
            connection, address = server.accept()
        except OSError:
            return
        connection.setblocking(False)
        caller = Caller(connection, str(address[0]))
        self.strangers[connection] = caller
        ready.register(connection, selectors.EVENT_READ)
        if len(self.strangers) > MOST_CALLERS:
            self._dismiss(next(iter(self.strangers.values())), ready)
        if not send(connection, caller.nonce, NO_PROOF, b"{}"):
            self._dismiss(caller, ready)

    def _dismiss_the_silent(self, ready: selectors.BaseSelector) -> None:
        for caller in list(self.strangers.values()):
            if time.monotonic() > caller.since + HELLO_WITHIN_S:
                self._dismiss(caller, ready)

    def _dismiss(self, caller: Caller, ready: selectors.BaseSelector) -> None:
        if self.strangers.pop(caller.connection, None):
            ready.unregister(caller.connection)
        caller.connection.close()

    def _hear(self, caller: Caller, ready: selectors.BaseSelector) -> str | None:
        """What a caller says; returns why the nodes cannot start, where it is one of ours and that cannot be."""
        try:
            if (line := caller.whole_line()) is None:
                return None
            came = self._proved(caller, line)
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            came = None
        if came is None:
            self._dismiss(caller, ready)
            return None
        del self.strangers[caller.connection]
        ready.unregister(caller.connection)
        came.clock_offset_s = time.time() - came.time
        error = self._what_is_wrong(came)
        if error:
            self._tell(caller, Answer(error=error))
            return error
        self.nodes[came.node_rank], self.callers[came.node_rank] = came, caller
        return None

    def _proved(self, caller: Caller, line: bytes) -> Hello | None:
        """Who it is; None: no node of this run."""
        if (match := LINE.fullmatch(line)) is None:
            return None
        caller.theirs, _, body = match.groups()
        return read_hello(body)

    def _what_is_wrong(self, came: Hello) -> str | None:
        rank, num_nodes = came.node_rank, self.cluster.num_nodes
        if came.num_nodes != num_nodes or rank not in range(num_nodes):
            return (f"{came.host} came as node {rank} of {came.num_nodes}, but node 0 waits for "
                    f"{num_nodes} nodes: give every node the same trainer.num_nodes.")  # fmt: skip
        if rank in self.nodes:
            return (f"two nodes say NODE_RANK={rank} ({self.nodes[rank].host} and {came.host}): "
                    "give each node its own.")  # fmt: skip
        return None

    def _tell(self, caller: Caller, answer: Answer) -> None:
        body = json.dumps(to_json(answer)).encode()
        caller.connection.settimeout(10)
        if not send(caller.connection, caller.nonce, NO_PROOF, body):
            log.info("A node went away while it was answered.")
        caller.connection.close()

    def _forget_the_gone(self) -> None:
        """A node that was stopped while it waited may come again."""
        for rank, caller in list(self.callers.items()):
            try:
                gone = caller.connection.recv(1, socket.MSG_PEEK) == b""
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                self.say(f"Node {rank} ({self.nodes[rank].host}) went away; waiting for it again.")
                caller.connection.close()
                del self.nodes[rank], self.callers[rank]


def _call(cluster: Cluster, hello: Hello, timeout_s: float, say: Callable[[str], None]) -> Answer:
    """The other nodes' side: call until node 0 answers."""
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    where, reason = f"{cluster.master_addr}:{cluster.master_port}", "no answer"
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((cluster.master_addr, cluster.master_port or 0), timeout=2) as connection:
                hello.time = time.time()
                return _ask(connection, hello, deadline)
        except (OSError, ValueError) as error:
            reason = str(error)
        if time.monotonic() > speak_at:
            say(f"Node {cluster.node_rank} waits for node 0 at {where} ({reason}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.5)
    raise UserError(
        f"node 0 did not answer at {where} within {timeout_s:.0f} s ({reason}): check MASTER_ADDR and MASTER_PORT."
    )


def _ask(connection: socket.socket, hello: Hello, deadline: float) -> Answer:
    """
    Raises:
        OSError, ValueError: it went away, or is not node 0 of this run.
    """
    theirs, _, _ = receive(connection, min(deadline, time.monotonic() + GREETING_WITHIN_S), LARGEST_HELLO_BYTES)
    mine, body = secrets.token_hex(16).encode(), json.dumps(to_json(hello)).encode()
    if not send(connection, mine, NO_PROOF, body):
        raise ValueError("it went away")
    nonce, _, body = receive(connection, deadline + 5, LARGEST_ANSWER_BYTES)
    if nonce != theirs:
        raise ValueError("it answers, but not as node 0 of this project")
    try:
        return from_json(Answer, json.loads(body))
    except (WrongValue, RecursionError):
        raise ValueError("it answers, but not as node 0 of this project") from None


def _compare(nodes: list[Hello], say: Callable[[str], None]) -> Answer:
    first = nodes[0]
    for other in nodes[1:]:
        if abs(other.clock_offset_s) > CLOCK_TOLERANCE_S:
            say(
                f"The clock of node {other.node_rank} ({other.host}) is {other.clock_offset_s:.0f} s off: "
                "S3 refuses requests beyond 15 minutes."
            )
        if error := _difference(other, first):
            return Answer(error=error)
    run_id = next((node.run_id for node in nodes if node.run_id), None)
    return Answer(run_id=run_id, nodes=nodes)


def _difference(other: Hello, first: Hello) -> str | None:
    who = f"node {other.node_rank} ({other.host})"
    if error := other.fingerprint.difference(first.fingerprint, who, f"node 0 ({first.host})"):
        return error
    if other.run_id and first.run_id and other.run_id != first.run_id:
        return f"{who} was given run_id={other.run_id}, node 0 {first.run_id}: give all nodes the same, or none."
    return None


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _listen(cluster: Cluster) -> socket.socket:
    try:
        return listen(cluster)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"MASTER_PORT={cluster.master_port} cannot be used on node 0: {reason}.") from None
