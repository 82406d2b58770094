"""Let the ranks of a run meet over one store, and compare their code and config."""

import errno
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from lockstep.process import signals
from lockstep.process.errors import UserError, is_disk_full
from lockstep.ranks.find import Cluster
from lockstep.ranks.heartbeat import Heartbeat
from lockstep.records.provenance import Fingerprint, describe_difference

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
LOG_INTERVAL_S = 5.0
# Rank 0 tells the others at the deadline who is missing. They wait this much longer to read it.
FOLLOWER_GRACE_S = 2.0
# The process of rank 0 may hold the store. It waits this long for the others to read an error.
ERROR_READ_GRACE_S = 2.0
START_KEY = "lockstep/start"

# The decision of rank 0, which must have a JSON form.
Decision = dict[str, Any]


class Introduction(NamedTuple):
    """The message of a rank to rank 0; the random nonce tells this start from earlier ones."""

    nonce: str
    host: str
    fingerprint: Fingerprint | None


class Answer(NamedTuple):
    """The answer of rank 0 to all ranks.

    Args:
        nonces: the nonces of the introductions that rank 0 has read.
        hosts: the name of each rank's host.
        error: why no rank starts; empty if all do.
    """

    nonces: list[str]
    hosts: list[str]
    decision: Decision
    error: str


@dataclass
class Meeting:
    """The store and the facts that the ranks of one start share once they have met.

    Attributes:
        store: a part of the store for this start alone, because torchrun keeps its store over
            restarts.
        hosts: the name of each rank's host.
        timeout_s: the longest that a rank waits for the others.
        decision: the decision of rank 0, for all ranks.
        agreements: how often this rank has begun `all_or_none` of process_group.py.
        heartbeat: notices a silent rank; None until the ranks have joined.
    """

    cluster: Cluster
    store: dist.Store
    hosts: list[str]
    timeout_s: float
    decision: Decision = field(default_factory=dict)
    agreements: int = 0
    heartbeat: Heartbeat | None = None

    @property
    def errors(self) -> dist.Store:
        """The store in which the ranks publish the error that ends them."""
        return dist.PrefixStore("errors", self.store)


_meetings: list[Meeting] = []


def get_last_meeting() -> Meeting | None:
    """Return the meeting of this start; None for a rank that has met nobody."""
    return _meetings[-1] if _meetings else None


def meet(
    cluster: Cluster,
    timeout_s: float,
    fingerprint: Fingerprint | None = None,
    decide: Callable[[], Decision] = dict,
) -> Meeting:
    """Wait for every rank, and hand rank 0's decision to all of them.

    torchrun keeps its store over restarts, so it may hold keys of an earlier start. Rank 0
    therefore puts the keys of this start under a random prefix; the meeting counts once rank 0 has
    read a nonce of each rank under the prefix and has sent these nonces back. If rank 0 of an
    earlier run still uploads when a node comes, the node waits for its end and connects again.

    Args:
        fingerprint: the code, config and packages of this rank, which must be those of rank 0.
        decide: called on rank 0 once all are there.

    Raises:
        UserError: a node did not come in time, ranks differ, or rank 0 refuses the start.
    """
    deadline = _Deadline(cluster, timeout_s)
    introduction = Introduction(secrets.token_hex(8), socket.gethostname(), fingerprint)
    if cluster.rank == 0:
        store, answer = _lead(deadline, introduction, decide)
    else:
        store, answer = _follow(deadline, introduction)
    if answer.error:
        let_others_read(cluster)
        raise UserError(answer.error)
    meeting = Meeting(cluster, store, answer.hosts, timeout_s, answer.decision)
    _meetings.append(meeting)
    return meeting


def let_others_read(cluster: Cluster) -> None:
    """Let the process of rank 0 live on for a moment, if it holds the store, before it ends."""
    if cluster.rank == 0 and not cluster.has_agent_store:
        time.sleep(ERROR_READ_GRACE_S)


class _Deadline:
    """The time until which a rank waits for the others; it logs every few seconds who is missing.

    Attributes:
        ends_at: a time of time.monotonic().
    """

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self.cluster = cluster
        self.timeout_s = timeout_s
        self.ends_at = time.monotonic() + timeout_s
        self._log_at = time.monotonic() + LOG_INTERVAL_S

    @property
    def address(self) -> str:
        return f"{self.cluster.master_addr}:{self.cluster.master_port}"

    def find_missing_nodes(self, arrived: Container[int]) -> list[int]:
        """Return the nodes of the ranks that have not arrived."""
        ranks = [rank for rank in range(self.cluster.world_size) if rank not in arrived]
        return sorted({rank // self.cluster.ranks_per_node for rank in ranks})

    def describe_missing(self, nodes: Sequence[int], reason: str = "") -> str:
        """Return the message of the error that ends a wait for nodes."""
        names = ", ".join(map(str, nodes))
        return (
            f"node rank {names} did not arrive at {self.address} within {self.timeout_s:.0f} s"
            f"{reason}: is the same command running there, with the same MASTER_ADDR and "
            "MASTER_PORT, and the port open?"
        )

    def pause(self, missing_nodes: Sequence[int], reason: str = "") -> None:
        """Sleep until the next look; raise UserError if nodes are missing well after the deadline.

        Args:
            reason: why the store cannot be reached, or rank 0 is not there.
        """
        if missing_nodes:
            if time.monotonic() > self.ends_at + FOLLOWER_GRACE_S:
                raise UserError(self.describe_missing(missing_nodes, reason))
            self._log(missing_nodes, reason)
        # An import may have caught the exception of a signal, after which this rank must not go on.
        signals.raise_if_received()
        time.sleep(POLL_INTERVAL_S)

    def _log(self, missing_nodes: Sequence[int], reason: str) -> None:
        if self.cluster.local_rank != 0 or time.monotonic() < self._log_at:
            return
        names = ", ".join(map(str, missing_nodes))
        log.info(f"Waiting for node rank {names} at {self.address}{reason} …")
        self._log_at += LOG_INTERVAL_S


def _connect(deadline: _Deadline) -> dist.TCPStore:
    """Open the store as soon as somebody serves it."""
    while True:
        try:
            return _open_store(deadline.cluster, deadline.timeout_s)
        except (OSError, dist.DistError) as problem:
            cause = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
            deadline.pause([0], f" ({cause})")


def _lead(
    deadline: _Deadline, introduction: Introduction, decide: Callable[[], Decision]
) -> tuple[dist.Store, Answer]:
    """Collect the introductions of all ranks, as rank 0, and answer them.

    Returns:
        The store of this start, and the answer.
    """
    store = _connect(deadline)
    prefix = f"lockstep/{introduction.nonce}"
    _introduce(store, prefix, 0, introduction)
    _publish_missing(store, prefix, deadline.find_missing_nodes([0]))
    store.set(START_KEY, introduction.nonce)

    introductions = _gather(store, prefix, deadline)
    missing_nodes = deadline.find_missing_nodes(introductions)
    if missing_nodes:
        error = deadline.describe_missing(missing_nodes)
    else:
        error = _describe_first_difference(introductions)
    answer = _answer(list(introductions.values()), error, decide)
    store.set(f"{prefix}/answer", json.dumps(answer))
    return dist.PrefixStore(prefix, store), answer


def _introduce(store: dist.TCPStore, prefix: str, rank: int, introduction: Introduction) -> None:
    """Put the introduction of a rank into the store, and add it to those that have arrived.

    The numbers of the ranks that have arrived are one text, to which each appends its own. So rank
    0 makes the same few calls in each look, however many ranks there are.
    """
    store.set(f"{prefix}/{rank}", json.dumps(introduction))
    # torch's type stubs lack this method.
    store.append(f"{prefix}/arrived", f"{rank} ")  # type: ignore[attr-defined]


def _publish_missing(store: dist.TCPStore, prefix: str, nodes: list[int]) -> None:
    """Tell the other ranks which nodes are missing."""
    store.set(f"{prefix}/missing", json.dumps(nodes))


def _gather(store: dist.TCPStore, prefix: str, deadline: _Deadline) -> dict[int, Introduction]:
    """Wait for all ranks until the deadline; return the introductions that have come, by rank."""
    publish_at = time.monotonic()
    while True:
        arrived = set(map(int, store.get(f"{prefix}/arrived").split()))
        missing_nodes = deadline.find_missing_nodes(arrived)
        if not missing_nodes or time.monotonic() > deadline.ends_at:
            break
        if time.monotonic() >= publish_at:
            _publish_missing(store, prefix, missing_nodes)
            publish_at = time.monotonic() + 1
        deadline.pause(missing_nodes)

    # The others wait without a limit for what rank 0 decides: it may search for the largest batch.
    _publish_missing(store, prefix, missing_nodes)
    ranks = sorted(arrived)
    texts = store.multi_get([f"{prefix}/{rank}" for rank in ranks])
    return {rank: Introduction(*json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}


def _describe_first_difference(introductions: dict[int, Introduction]) -> str:
    """Return a sentence on the first rank that differs from rank 0; empty if none does.

    It is like "rank 1 on b has seed=2, rank 0 on a has seed=1".
    """
    rank_0 = introductions[0]
    for rank, other in introductions.items():
        if not rank_0.fingerprint or not other.fingerprint:
            continue
        difference = describe_difference(
            other.fingerprint,
            rank_0.fingerprint,
            f"rank {rank} on {other.host}",
            f"rank 0 on {rank_0.host}",
        )
        if difference:
            return difference
    return ""


def _answer(
    introductions: list[Introduction], error: str, decide: Callable[[], Decision]
) -> Answer:
    """Return rank 0's answer, with its decision if there is no error so far."""
    hosts = [each.host for each in introductions]
    decision: Decision = {}
    if not error:
        try:
            decision = decide()
        except UserError as problem:
            error = str(problem)
        except OSError as problem:
            if is_disk_full(problem):
                raise
            # The other ranks get this error, too, and need not wait for rank 0.
            error = f"rank 0 on {hosts[0]}: {problem}"
    return Answer([each.nonce for each in introductions], hosts, decision, error)


class _StartState(NamedTuple):
    """The state of rank 0's start, as a rank sees it in the store.

    Args:
        prefix: the prefix of the start's keys; empty while rank 0 is not there.
        missing_nodes: the nodes that rank 0 waits for, or node 0 if it is not there itself.
        is_gathering: rank 0 of this start is there, and has not answered yet.
        answer: the answer that is meant for this rank.
        reason: why rank 0 is not there.
    """

    prefix: str = ""
    missing_nodes: Sequence[int] = (0,)
    is_gathering: bool = False
    answer: Answer | None = None
    reason: str = ""


def _follow(deadline: _Deadline, introduction: Introduction) -> tuple[dist.Store, Answer]:
    """Introduce this rank to rank 0, and wait for the answer that is meant for it.

    Returns:
        The store of this start, and the answer.
    """
    store = _connect(deadline)
    start = _StartState()
    while True:
        try:
            start = _introduce_and_read(store, start.prefix, deadline.cluster.rank, introduction)
        except dist.DistError:
            if start.is_gathering:
                message = f"rank 0 at {deadline.address} has ended before the run began"
                raise RuntimeError(message) from None
            # This was the store of an earlier run, whose rank 0 has ended.
            deadline.pause([0], start.reason)
            store = _connect(deadline)
            start = _StartState()
            continue
        if start.answer is not None:
            return dist.PrefixStore(start.prefix, store), start.answer
        deadline.pause(start.missing_nodes, start.reason)


def _introduce_and_read(
    store: dist.TCPStore, introduced_at: str, rank: int, introduction: Introduction
) -> _StartState:
    """Return the state of rank 0's start; introduce this rank to a start that it sees first.

    Args:
        introduced_at: the prefix of the start at which this rank has introduced itself.
    """
    if not store.check([START_KEY]):
        return _StartState()
    prefix = f"lockstep/{store.get(START_KEY).decode()}"
    # The store may have held an earlier start until now, when rank 0 has begun this one.
    if prefix != introduced_at:
        _introduce(store, prefix, rank, introduction)
    missing_nodes = json.loads(store.get(f"{prefix}/missing"))
    if not store.check([f"{prefix}/answer"]):
        return _StartState(prefix, missing_nodes, is_gathering=True)
    answer = Answer(*json.loads(store.get(f"{prefix}/answer")))
    if introduction.nonce in answer.nonces:
        return _StartState(prefix, answer=answer)
    return _StartState(prefix, reason=" (its earlier run is still there)")


def _open_store(cluster: Cluster, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of torchrun's or Lockstep's agent, or of rank 0, which serves it itself.

    Raises:
        OSError: nobody serves it yet.
        UserError: rank 0 cannot serve at that address.
    """
    address = cluster.master_addr
    port = cluster.master_port or 0
    listener = None
    if cluster.rank == 0 and not cluster.has_agent_store:
        listener = _listen(address, port)
    else:
        # torch's own connection would wait in silence.
        socket.create_connection((address, port), timeout=2).close()
    return dist.TCPStore(
        address,
        port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener,
    )


def _listen(address: str, port: int) -> int:
    """Return the handle of a socket that listens at MASTER_ADDR alone.

    It listens on every interface if the network translates that address.
    """
    try:
        family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        try:
            return socket.create_server((str(place[0]), port), family=family, backlog=1024).detach()
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return socket.create_server(("", port), family=family, backlog=1024).detach()
    except OSError as error:
        raise UserError(
            f"rank 0 cannot serve at {address}:{port} ({error.strerror}): check MASTER_ADDR and "
            "MASTER_PORT."
        ) from None
