"""Let the ranks of a run meet over one store, and compare their code and config."""

import errno
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
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
SPEAK_INTERVAL_S = 5.0
# Rank 0 tells the others at the deadline who is missing. They wait so much longer to read it.
LATER_THAN_RANK_ZERO_S = 2.0
# The process of rank 0 may hold the store. It stays so long for the others to read an error.
READ_WITHIN_S = 2.0
START = "lockstep/start"

Answer = dict[str, Any]


class Introduction(NamedTuple):
    """A rank's words to rank 0; the random nonce tells this start from earlier ones."""

    nonce: str
    host: str
    fingerprint: Fingerprint | None


@dataclass
class Meeting:
    """The store and the facts that the ranks of one start share once they have met.

    Attributes:
        store: of this start alone, as torchrun keeps its store over restarts.
        hosts: the name of each rank's host.
        timeout_s: the longest that a rank waits for the others.
        agreements: how many `all_or_none` of process_group.py has begun on this rank.
        heartbeat: by which the ranks notice a silent one; None until they have joined.
    """

    cluster: Cluster
    store: dist.Store
    hosts: list[str]
    timeout_s: float
    agreements: int = 0
    heartbeat: Heartbeat | None = None

    @property
    def errors(self) -> dist.Store:
        """The store in which the ranks publish the error that ends them."""
        return dist.PrefixStore("errors", self.store)


_meetings: list[Meeting] = []


def last_meeting() -> Meeting | None:
    """Return the meeting of this start; None for a rank that has met nobody."""
    return _meetings[-1] if _meetings else None


def meet(
    cluster: Cluster,
    timeout_s: float,
    fingerprint: Fingerprint | None = None,
    decide: Callable[[], Answer] = dict,
) -> Answer:
    """Wait for every rank, and return rank 0's decisions on all of them.

    torchrun keeps its store over restarts, so it may hold keys of an earlier start. Rank 0
    therefore puts the keys of this start under a random prefix; the meeting counts once rank 0 has
    read a random number of each rank under the prefix and has sent these numbers back. A node that
    comes while rank 0 of an earlier run still uploads waits for that one's end, and connects again.

    Args:
        fingerprint: the code, config and packages of this rank, which must be those of rank 0.
        decide: called on rank 0 once all are there; its result must have a JSON form.

    Raises:
        UserError: a node did not come in time, ranks differ, or rank 0 refuses the start.
    """
    wait = _Wait(cluster, timeout_s)
    introduction = Introduction(secrets.token_hex(8), socket.gethostname(), fingerprint)

    answer: Answer | None = None
    while answer is None:
        store = _connect(cluster, timeout_s, wait)
        try:
            if cluster.rank == 0:
                prefix, answer = _lead(store, wait, introduction, decide)
            else:
                prefix, answer = _follow(store, wait, introduction)
        except (OSError, dist.DistError):
            if wait.has_begun:
                message = f"rank 0 at {wait.address} has ended before the run began"
                raise RuntimeError(message) from None
            # The store was of an earlier run, whose rank 0 has ended.
            wait.pause([0])

    if "error" in answer:
        let_others_read(cluster)
        raise UserError(answer["error"])
    start = dist.PrefixStore(prefix, store)
    _meetings.append(Meeting(cluster, start, answer["hosts"], timeout_s))
    return answer


def let_others_read(cluster: Cluster) -> None:
    """Let the process of rank 0 live on for a moment, if it holds the store, before it ends."""
    if cluster.rank == 0 and not cluster.agent_store:
        time.sleep(READ_WITHIN_S)


class _Wait:
    """The patience of a rank: it polls, says every few seconds who is missing, and ends in time."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self.cluster = cluster
        self.timeout_s = timeout_s
        self.reason = ""  # why the store cannot be reached, or rank 0 is not there
        # Whether rank 0 of this start is there, and has not answered yet.
        self.has_begun = cluster.rank == 0
        self.deadline = time.monotonic() + timeout_s
        self._speak_at = time.monotonic() + SPEAK_INTERVAL_S

    @property
    def address(self) -> str:
        return f"{self.cluster.master_addr}:{self.cluster.master_port}"

    def nodes_of(self, ranks: list[int]) -> list[int]:
        return sorted({rank // self.cluster.ranks_per_node for rank in ranks})

    def error(self, nodes: list[int]) -> str:
        names = ", ".join(map(str, nodes))
        return (
            f"node rank {names} did not arrive at {self.address} within {self.timeout_s:.0f} s"
            f"{self.reason}: is the same command running there, with the same MASTER_ADDR and "
            "MASTER_PORT, and the port open?"
        )

    def pause(self, missing_nodes: list[int]) -> None:
        """Sleep until the next look; raise UserError long after the deadline, if nodes miss."""
        if missing_nodes:
            if time.monotonic() > self.deadline + LATER_THAN_RANK_ZERO_S:
                raise UserError(self.error(missing_nodes))
            self._speak(missing_nodes)
        # An import may have caught the exception of a signal. A rank that heard one does not come.
        signals.raise_if_received()
        time.sleep(POLL_INTERVAL_S)

    def _speak(self, missing_nodes: list[int]) -> None:
        if self.cluster.local_rank != 0 or time.monotonic() < self._speak_at:
            return
        names = ", ".join(map(str, missing_nodes))
        log.info(f"Waiting for node rank {names} at {self.address}{self.reason} …")
        self._speak_at += SPEAK_INTERVAL_S


def _connect(cluster: Cluster, timeout_s: float, wait: _Wait) -> dist.TCPStore:
    """Open the store as soon as somebody serves it."""
    while True:
        try:
            store = _open_store(cluster, timeout_s)
        except (OSError, dist.DistError) as problem:
            cause = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
            wait.reason = f" ({cause})"
            wait.pause([0])
        else:
            wait.reason = ""
            return store


def _lead(
    store: dist.TCPStore,
    wait: _Wait,
    introduction: Introduction,
    decide: Callable[[], Answer],
) -> tuple[str, Answer]:
    """Collect the introductions of all ranks, as rank 0, and answer them.

    A rank makes the same few calls in each look, however many ranks there are: the numbers of the
    ranks that have come are one text, to which each appends its own.

    Returns:
        The prefix of this start's keys, and the answer.
    """
    prefix = f"lockstep/{introduction.nonce}"
    missing = list(range(1, wait.cluster.world_size))
    store.set(f"{prefix}/0", json.dumps(introduction))
    _arrive(store, prefix, 0)
    _publish(store, prefix, wait.nodes_of(missing))
    store.set(START, introduction.nonce)

    publish_at = time.monotonic()
    while True:
        arrived = set(map(int, store.get(f"{prefix}/arrived").split()))
        missing = [rank for rank in range(wait.cluster.world_size) if rank not in arrived]
        if not missing or time.monotonic() > wait.deadline:
            break
        nodes = wait.nodes_of(missing)
        if time.monotonic() >= publish_at:
            _publish(store, prefix, nodes)
            publish_at = time.monotonic() + 1
        wait.pause(nodes)

    # The others wait without a limit for what rank 0 decides: it may search for the largest batch.
    _publish(store, prefix, wait.nodes_of(missing))
    keys = [f"{prefix}/{rank}" for rank in sorted(arrived)]
    everyone = [Introduction(*json.loads(text)) for text in store.multi_get(keys)]
    if missing:
        answer: Answer = {"error": wait.error(wait.nodes_of(missing))}
    else:
        answer = _answer(everyone, decide)
    answer["numbers"] = [each.nonce for each in everyone]
    store.set(f"{prefix}/answer", json.dumps(answer))
    return prefix, answer


def _arrive(store: dist.TCPStore, prefix: str, rank: int) -> None:
    """Add a rank to those that have introduced themselves."""
    # torch's type stubs lack this method.
    store.append(f"{prefix}/arrived", f"{rank} ")  # type: ignore[attr-defined]


def _publish(store: dist.TCPStore, prefix: str, missing_nodes: list[int]) -> None:
    """Tell the other ranks which nodes miss."""
    store.set(f"{prefix}/missing", json.dumps(missing_nodes))


def _follow(store: dist.TCPStore, wait: _Wait, introduction: Introduction) -> tuple[str, Answer]:
    """Introduce this rank to rank 0, and wait for the answer that is meant for it.

    Returns:
        The prefix of this start's keys, and the answer.
    """
    rank = wait.cluster.rank
    introduced_at = ""
    while True:
        missing_nodes = [0]
        if store.check([START]):
            # Rank 0 may come later and begin anew, in a store that holds an earlier start.
            prefix = f"lockstep/{store.get(START).decode()}"
            if prefix != introduced_at:
                store.set(f"{prefix}/{rank}", json.dumps(introduction))
                _arrive(store, prefix, rank)
                introduced_at = prefix
            missing_nodes = json.loads(store.get(f"{prefix}/missing"))
            wait.has_begun = not store.check([f"{prefix}/answer"])
            if wait.has_begun:
                wait.reason = ""
            else:
                answer = json.loads(store.get(f"{prefix}/answer"))
                if introduction.nonce in answer["numbers"]:
                    return prefix, answer
                missing_nodes = [0]
                wait.reason = " (its earlier run is still there)"
        wait.pause(missing_nodes)


def _answer(everyone: list[Introduction], decide: Callable[[], Answer]) -> Answer:
    """Compare every rank with rank 0, and decide if all are equal."""
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if not first.fingerprint or not other.fingerprint:
            continue
        difference = describe_difference(
            other.fingerprint,
            first.fingerprint,
            f"rank {rank} on {other.host}",
            f"rank 0 on {first.host}",
        )
        if difference:
            return {"error": difference}
    try:
        return {**decide(), "hosts": [each.host for each in everyone]}
    except UserError as error:
        return {"error": str(error)}
    except OSError as error:
        if is_disk_full(error):
            raise
        # An error of a file is not the end of the store, for which `meet` would take it.
        return {"error": f"rank 0 on {first.host}: {error}"}


def _open_store(cluster: Cluster, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of torchrun's or Lockstep's agent, or of rank 0, which serves it itself.

    Raises:
        OSError: nobody serves it yet.
        UserError: rank 0 cannot serve at that address.
    """
    address = cluster.master_addr
    port = cluster.master_port or 0
    listener = None
    if cluster.rank == 0 and not cluster.agent_store:
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
