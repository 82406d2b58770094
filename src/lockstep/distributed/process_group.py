"""The ranks of one run find each other: store, process group, and proof that all run the same thing."""

import json
import logging
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.distributed.cluster import Cluster, listen
from lockstep.runs import provenance
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint, Host
from lockstep.runs.typed_json import Part

log = logging.getLogger(__name__)

SPEAK_INTERVAL_S = 5.0
NCCL_LATER_S = 15.0  # NCCL's timeout aborts the process: gloo's, which raises an exception, comes first


def join(cluster: Cluster, device: torch.device, timeout_s: float) -> dist.Store:
    """Make the default process group, saying which ranks are still missing.

    Returns:
        A store of this start alone: torchrun keeps one over its restarts.
    Raises:
        UserError: a rank did not come in time, or is none of this run's.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = _store(cluster, timeout_s)
    start, _ = handshake(store, cluster, timeout_s)
    _make_group(dist.PrefixStore(f"lockstep/{start}/group", store), cluster, device, timeout_s)
    return dist.PrefixStore(f"lockstep/{start}/errors", store)


def be_alone(cluster: Cluster, device: torch.device, timeout_s: float) -> None:
    """A process group of one, for a strategy of several ranks: torch's own would meet itself at an open port."""
    _make_group(dist.HashStore(), cluster, device, timeout_s)


def _make_group(store: dist.Store, cluster: Cluster, device: torch.device, timeout_s: float) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=cluster.rank,
        world_size=cluster.world_size,
        timeout=timedelta(seconds=timeout_s + (NCCL_LATER_S if device.type == "cuda" else 0.0)),
        device_id=device if device.type == "cuda" else None,
    )


def agreed_run_id(cluster: Cluster, mine: str, timeout_s: float) -> str:
    """Rank 0's run id, on every rank, through the store of torchrun's agent: before any folder is made."""
    return str(handshake(_store(cluster, timeout_s), cluster, timeout_s, "run-id", mine)[1])


def _store(cluster: Cluster, timeout_s: float) -> dist.TCPStore:
    """torchrun's agent serves a store already; else rank 0 does."""
    serves = cluster.rank == 0 and not cluster.agent_store
    where = f"{cluster.master_addr}:{cluster.master_port}"
    if not serves:
        _wait_for_port(cluster, timeout_s)
    try:
        return dist.TCPStore(
            cluster.master_addr, cluster.master_port, is_master=serves, wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s), master_listen_fd=listen(cluster).detach() if serves else None,
        )  # fmt: skip
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        what = f"cannot serve at {where}" if serves else f"cannot reach rank 0 at {where}"
        raise UserError(f"rank {cluster.rank} {what} ({reason}): check MASTER_ADDR and MASTER_PORT.") from None


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
) -> tuple[str, str | None]:
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
            start = store.get(f"{key}/start").decode(errors="replace")
        missing = list(here)
        if start is not None:
            store.set(f"{key}/{start}/{cluster.rank}", number)
            missing = [rank for rank in here if not store.check([f"{key}/{start}/{rank}"])]
        if cluster.rank == 0 and not missing:
            numbers = [store.get(f"{key}/{start}/{rank}").decode(errors="replace") for rank in here]
            store.set(f"{key}/{start}/all", json.dumps([numbers, word]))
            return number, word
        if start is not None and store.check([f"{key}/{start}/all"]):
            numbers, said = _all_of(store.get(f"{key}/{start}/all"))
            if cluster.rank < len(numbers) and numbers[cluster.rank] == number:
                return start, said
        nodes = ", ".join(str(node) for node in sorted({rank // cluster.devices for rank in missing})) or "0"
        if time.monotonic() > deadline:
            raise UserError(
                f"node rank {nodes} did not arrive within {timeout_s:.0f} s: is it running the same command?"
            )
        if time.monotonic() > speak_at and cluster.local_rank == 0:
            log.info(f"Waiting for node rank {nodes} (ranks {', '.join(map(str, missing[:8]))}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.05)


def _all_of(value: bytes) -> tuple[list[str], str | None]:
    """The ranks' numbers and rank 0's word; no numbers where it is something else."""
    try:
        numbers, word = json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return [], None
    fits = isinstance(numbers, list) and isinstance(word, str | None)
    return (numbers, word) if fits else ([], None)


@dataclass(kw_only=True)
class Introduction(Part):
    """What one rank says of itself."""

    tree_hash: str = ""
    config_hash: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    host: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.tree_hash, self.config_hash, self.versions)


def check_all_equal(mine: Fingerprint, cluster: Cluster) -> list[Host]:
    """Every rank's host, in rank order, once all run the same code, options and packages.

    Raises:
        UserError: on every rank, naming the first that differs.
    """
    own = Introduction(**asdict(mine), host=provenance.host(cluster.node_rank))
    everyone: list[Introduction] = [own] * cluster.world_size
    dist.all_gather_object(everyone, own)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        names = f"rank {rank} on {other.host.get('host')}", f"rank 0 on {first.host.get('host')}"
        if error := other.fingerprint.difference(first.fingerprint, *names):
            raise UserError(error)
    return [other.host for other in everyone]
