"""The ranks of one run find each other: store, process group, and proof that all run the same thing."""

import json
import logging
import secrets
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.distributed.cluster import Cluster
from lockstep.runs import provenance
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint, Host

log = logging.getLogger(__name__)

SPEAK_INTERVAL_S = 5.0


def join(cluster: Cluster, device: torch.device, timeout_s: float) -> str:
    """Make the default process group, saying which ranks are still missing.

    Returns:
        The name of this start in the run's store, which torchrun keeps over its restarts: for own_connection.
    Raises:
        UserError: a rank did not come in time.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _store(cluster, timeout_s)
    start, _ = handshake(store, cluster, timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"lockstep/{start}/group", store),
        rank=cluster.rank,
        world_size=cluster.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return start


def own_connection(cluster: Cluster, start: str, timeout_s: float) -> Any:
    """A second connection to the run's store, for the watching thread alone."""
    store = dist.TCPStore(
        cluster.master_addr, cluster.master_port, is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip
    return dist.PrefixStore(f"lockstep/{start}/watch", store)


def agreed_run_id(cluster: Cluster, mine: str, timeout_s: float) -> str:
    """Rank 0's run id, on every rank, through the store of torchrun's agent: before any folder is made."""
    return handshake(_store(cluster, timeout_s), cluster, timeout_s, "run-id", mine)[1]


def _store(cluster: Cluster, timeout_s: float) -> Any:
    """torchrun's agent serves a store already; else rank 0 does."""
    serves = cluster.rank == 0 and not cluster.agent_store
    where = f"{cluster.master_addr}:{cluster.master_port}"
    if not serves:
        _wait_for_port(cluster, timeout_s)
    try:
        return dist.TCPStore(
            cluster.master_addr, cluster.master_port, is_master=serves, wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s), master_listen_fd=_on_loopback(cluster) if serves else None,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        what = f"cannot serve at {where}" if serves else f"cannot reach rank 0 at {where}"
        raise UserError(f"rank {cluster.rank} {what} ({reason}): check MASTER_ADDR and MASTER_PORT.") from None


def _on_loopback(cluster: Cluster) -> int | None:
    """A socket for the store of one machine's ranks; torch would listen on every interface, to anybody's words."""
    if not cluster.master_addr.startswith("127."):
        return None
    return socket.create_server((cluster.master_addr, cluster.master_port or 0), backlog=1024).detach()


def _wait_for_port(cluster: Cluster, timeout_s: float) -> None:
    """torch's own connect is silent for as long as it waits."""
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    where = f"{cluster.master_addr}:{cluster.master_port}"
    while True:
        try:
            socket.create_connection((cluster.master_addr, cluster.master_port or 0), timeout=2).close()
            return
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {cluster.rank} cannot reach rank 0 at {where} within {timeout_s:.0f} s ({reason}): node rank 0 "
                "did not start the same command, or MASTER_ADDR or MASTER_PORT is wrong."
            )
        if time.monotonic() > speak_at and cluster.local_rank == 0:
            log.info(f"Waiting for node rank 0 at {where} ({reason}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.1)


def handshake(
    store: Any, cluster: Cluster, timeout_s: float, name: str = "join", word: str | None = None
) -> tuple[str, Any]:
    """Every rank of this start is here, none of an earlier one: (the start's own name, rank 0's word).

    torchrun keeps one store over its restarts and counts them on each node for itself, so nobody can tell from
    outside which start a key is of. Rank 0 makes up a name; it counts once it has seen a fresh number of every rank
    under that name, and has sent the numbers back.

    Raises:
        UserError: a rank did not come in time.
    """
    number, key = secrets.token_hex(8), f"lockstep/{name}"
    start, here = None, range(cluster.world_size)
    if cluster.rank == 0:
        start = number
        store.set(f"{key}/start", start)
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    while True:
        if cluster.rank > 0 and store.check([f"{key}/start"]):
            start = store.get(f"{key}/start").decode()
        missing = list(here)
        if start is not None:
            store.set(f"{key}/{start}/{cluster.rank}", number)
            missing = [rank for rank in here if not store.check([f"{key}/{start}/{rank}"])]
        if cluster.rank == 0 and not missing:
            numbers = [store.get(f"{key}/{start}/{rank}").decode() for rank in here]
            store.set(f"{key}/{start}/all", json.dumps([numbers, word]))
            return number, word
        if start is not None and store.check([f"{key}/{start}/all"]):
            numbers, words = json.loads(store.get(f"{key}/{start}/all"))
            if numbers[cluster.rank] == number:
                return start, words
        nodes = ", ".join(str(node) for node in sorted({rank // cluster.devices for rank in missing})) or "0"
        if time.monotonic() > deadline:
            raise UserError(
                f"node rank {nodes} did not arrive within {timeout_s:.0f} s: is it running the same command?"
            )
        if time.monotonic() > speak_at and cluster.local_rank == 0:
            log.info(f"Waiting for node rank {nodes} (ranks {', '.join(map(str, missing[:8]))}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.05)


def check_all_equal(mine: Fingerprint, cluster: Cluster) -> list[Host]:
    """Every rank's host, in rank order, once all run the same code, options and packages.

    Raises:
        UserError: on every rank, naming the first that differs.
    """
    everyone: list[Any] = [None] * cluster.world_size
    dist.all_gather_object(everyone, (mine, provenance.host(cluster.node_rank)))
    first, first_host = everyone[0]
    for rank, (other, host) in enumerate(everyone):
        names = f"rank {rank} on {host['host']}", f"rank 0 on {first_host['host']}"
        if error := other.difference(first, *names):
            raise UserError(error)
    return [host for _, host in everyone]
