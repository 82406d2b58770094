"""The ranks of one run meet: they wait for each other, run the same code and config, and make the process group."""

import errno
import ipaddress
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.launch.launchers import Cluster
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint

log = logging.getLogger(__name__)

SPEAK_INTERVAL_S = 5.0
READ_WITHIN_S = 5.0  # rank 0, whose process may hold the store, stays so long for the others to read an error
NCCL_LATER_S = 15.0  # NCCL's timeout aborts the process: gloo's, which raises an exception, comes first
Answer = dict[str, Any]
_met: list[dist.Store] = []  # the store of this start


def meet(
    cluster: Cluster, timeout_s: float, mine: Fingerprint | None = None, run_id: str | None = None,
    decide: Callable[[], Answer] = dict,
) -> Answer:  # fmt: skip
    """Wait for every rank, and return rank 0's decisions on all of them.

    torchrun keeps one store over its restarts, so a rank cannot tell which start a key is of: rank 0 makes up
    a name, which counts once rank 0 has seen a fresh number of every rank under it and has sent the numbers back.

    Args:
        mine: the code, config and packages of this rank, which must be those of rank 0.
        run_id: the one that this rank was given, if any, which must be rank 0's if both were given one.
        decide: called on rank 0 once all are there; its result must have a JSON form.

    Raises:
        UserError: on every rank if a rank did not come in time, differs, or rank 0 decided so.
    """
    store, number, start = _open_store(cluster, timeout_s), secrets.token_hex(8), None
    own = json.dumps([number, socket.gethostname(), asdict(mine) if mine else None, run_id])
    where, missing = f"{cluster.master_addr}:{cluster.master_port}", list(range(cluster.world_size))
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    if cluster.rank == 0:
        start = number
        store.set("lockstep/start", start)
    while True:
        try:
            if cluster.rank > 0 and store.check(["lockstep/start"]):
                start = store.get("lockstep/start").decode()
            keys = [f"lockstep/{start}/{rank}" for rank in range(cluster.world_size)]
            if start is not None:
                store.set(keys[cluster.rank], own)
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            nodes = ", ".join(str(node) for node in sorted({rank // cluster.devices for rank in missing}))
            late = f"node rank {nodes} did not arrive at {where} within {timeout_s:.0f} s: is the same command running "
            late += "there, with the same MASTER_PORT, and the port open?"
            if cluster.rank == 0 and (not missing or time.monotonic() > deadline):
                came = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if rank not in missing}
                answer: Answer = {"error": late} if missing else _answer(list(came.values()), cluster, decide)
                answer["numbers"] = [each[0] for each in came.values()]
                store.set(f"lockstep/{start}/answer", json.dumps(answer))
                break
            if cluster.rank > 0 and start and store.check([f"lockstep/{start}/answer"]):
                answer = json.loads(store.get(f"lockstep/{start}/answer"))
                if number in answer["numbers"]:
                    break
        except dist.DistError:
            raise RuntimeError(f"rank 0 at {where} has ended before the run began") from None
        if missing and time.monotonic() > deadline + 2:  # rank 0 tells the others first
            raise UserError(late)
        if missing and time.monotonic() > speak_at and cluster.local_rank == 0:
            log.info(f"Waiting for node rank {nodes} (ranks {', '.join(map(str, missing[:8]))}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.05)
    _met.append(dist.PrefixStore(f"lockstep/{start}", store))
    if error := answer.get("error"):
        _met[-1].set(f"read/{cluster.rank}", "")
        everyone = [f"read/{rank}" for rank in range(cluster.world_size) if rank not in missing]
        until = time.monotonic() + READ_WITHIN_S
        while cluster.rank == 0 and time.monotonic() < until and not _met[-1].check(everyone):
            time.sleep(0.05)
        raise UserError(error)
    return answer


def _answer(everyone: list[list[Any]], cluster: Cluster, decide: Callable[[], Answer]) -> Answer:
    """Compare every rank with rank 0, and decide if all are equal."""
    _, first_host, first, first_id = everyone[0]
    for rank, (_, host, other, run_id) in enumerate(everyone):
        who, who_first = f"rank {rank} on {host}", f"rank 0 on {first_host}"
        if first and other and (error := Fingerprint(**other).difference(Fingerprint(**first), who, who_first)):
            return {"error": error}
        if run_id and first_id and run_id != first_id:
            return {"error": f"{who} was given run_id={run_id}, {who_first} {first_id}: give all the same, or none."}
    try:
        return {**decide(), "hosts": [host for _, host, _, _ in everyone]}
    except UserError as error:
        return {"error": str(error)}


def join(cluster: Cluster, device: torch.device, timeout_s: float) -> dist.Store:
    """Make the default process group of the ranks that have met, or meet first; one rank is a group of its own.

    Returns:
        A store of this start alone: torchrun keeps one over its restarts.

    Raises:
        UserError: a rank did not come in time.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if cluster.world_size > 1 and not _met:
        meet(cluster, timeout_s)
    store: dist.Store = _met[-1] if cluster.world_size > 1 else dist.HashStore()  # torch's own would listen at a port
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=cluster.rank,
        world_size=cluster.world_size,
        timeout=timedelta(seconds=timeout_s + (NCCL_LATER_S if device.type == "cuda" else 0.0)),
        device_id=device if device.type == "cuda" else None,
    )
    return dist.PrefixStore("errors", store)


def _open_store(cluster: Cluster, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of torchrun's or Lockstep's agent, or of rank 0, which serves it here."""
    where = f"{cluster.master_addr}:{cluster.master_port}"
    if cluster.rank == 0 and not cluster.agent_store:
        try:
            return _connect(cluster, timeout_s, _listen(cluster).detach())
        except OSError as error:
            reason = f"rank 0 cannot serve at {where} ({error.strerror})"
            raise UserError(f"{reason}: check MASTER_ADDR and MASTER_PORT.") from None
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    while True:
        try:  # torch's own connect would be silent for as long as it waits
            socket.create_connection((cluster.master_addr, cluster.master_port or 0), timeout=2).close()
            return _connect(cluster, timeout_s)
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        if time.monotonic() > deadline:
            raise UserError(
                f"rank {cluster.rank} cannot reach rank 0 at {where} within {timeout_s:.0f} s ({reason}): node rank 0 "
                "did not start the same command, or MASTER_ADDR or MASTER_PORT is wrong."
            )
        if time.monotonic() > speak_at and cluster.local_rank == 0:
            log.info(f"Waiting for node rank 0 at {where} ({reason}) …")
            speak_at += SPEAK_INTERVAL_S
        time.sleep(0.1)


def _connect(cluster: Cluster, timeout_s: float, listener: int | None = None) -> dist.TCPStore:
    return dist.TCPStore(
        cluster.master_addr, cluster.master_port or 0, is_master=listener is not None, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s), master_listen_fd=listener,
    )  # fmt: skip


def _listen(cluster: Cluster) -> socket.socket:
    """Listen at MASTER_PORT on the address of MASTER_ADDR alone; torch's store would listen on every interface.

    It does so if the address is translated by the network, or this machine's name stands for loopback (127.0.1.1).
    """
    family, *_, found = socket.getaddrinfo(cluster.master_addr, cluster.master_port, type=socket.SOCK_STREAM)[0]
    address, port = str(found[0]), cluster.master_port or 0
    is_loopback = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    by_name = cluster.num_nodes > 1 and is_loopback and address != cluster.master_addr
    try:
        return socket.create_server(("" if by_name else address, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port), family=family, backlog=1024)
