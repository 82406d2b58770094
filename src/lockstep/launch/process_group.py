"""Let the ranks of a run meet: wait for all, compare their code and config, and create the process group."""

import errno
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.launch.launchers import Cluster
from lockstep.runs import signals
from lockstep.runs.errors import UserError
from lockstep.runs.provenance import Fingerprint, first_difference

log = logging.getLogger(__name__)

SPEAK_INTERVAL_S = 5.0
READ_WITHIN_S = 2.0  # rank 0, whose process may hold the store, stays so long for the others to read an error
NCCL_LATER_S = 15.0  # NCCL's timeout aborts the process: gloo's, which raises an exception, comes first
Answer = dict[str, Any]
_met: list[dist.Store] = []  # the store of this start


def meet(
    cluster: Cluster, timeout_s: float, mine: Fingerprint | None = None, decide: Callable[[], Answer] = dict
) -> Answer:  # fmt: skip
    """Wait for every rank, and return rank 0's decisions on all of them.

    torchrun keeps its store over restarts, so it may hold keys of an earlier start. Rank 0 therefore puts the keys of
    this start under a random prefix; the meeting counts once rank 0 has read a random number of each rank under the
    prefix and has sent these numbers back.

    Args:
        mine: the code, config and packages of this rank, which must be those of rank 0.
        decide: called on rank 0 once all are there; its result must have a JSON form.
    """
    where, rank, number = f"{cluster.master_addr}:{cluster.master_port}", cluster.rank, secrets.token_hex(8)
    own = json.dumps([number, socket.gethostname(), mine])
    deadline, speak_at = time.monotonic() + timeout_s, time.monotonic() + SPEAK_INTERVAL_S
    store: dist.Store | None = None
    start, missing, keys, reason = b"", [0], [""], ""
    while True:
        try:
            store = store or _open_store(cluster, timeout_s)
            if rank == 0:
                store.set("lockstep/start", number)
            if rank == 0 or store.check(["lockstep/start"]):
                start, reason = store.get("lockstep/start"), ""
                keys = [f"lockstep/{start.decode()}/{each}" for each in range(cluster.world_size)]
                store.set(keys[rank], own)
                missing = [each for each, key in enumerate(keys) if not store.check([key])]
            if rank > 0 and start and store.check([f"{keys[0]}/answer"]):
                answer = json.loads(store.get(f"{keys[0]}/answer"))
                if number in answer["numbers"]:
                    break
        except (OSError, dist.DistError) as problem:
            if store is not None:
                raise RuntimeError(f"rank 0 at {where} has ended before the run began") from None
            reason = f" ({getattr(problem, 'strerror', None) or str(problem).splitlines()[0]})"
        nodes = ", ".join(map(str, sorted({each // cluster.devices for each in missing})))
        error = (
            f"node rank {nodes} did not arrive at {where} within {timeout_s:.0f} s{reason}: is the same command "
            "running there, with the same MASTER_ADDR and MASTER_PORT, and the port open?"
        )
        if rank == 0 and store is not None and (not missing or time.monotonic() > deadline):
            everyone = [json.loads(store.get(key)) for each, key in enumerate(keys) if each not in missing]
            answer = {"error": error} if missing else _answer(everyone, decide)
            answer["numbers"] = [each[0] for each in everyone]
            store.set(f"{keys[0]}/answer", json.dumps(answer))
            break
        if missing and time.monotonic() > deadline + 2:  # rank 0 tells the others first
            raise UserError(error)
        if missing and time.monotonic() > speak_at and cluster.local_rank == 0:
            log.info(f"Waiting for node rank {nodes} at {where}{reason} …")
            speak_at += SPEAK_INTERVAL_S
        signals.check()  # an import may have caught the exception of one, and a rank that heard it does not come
        time.sleep(0.05)
    _met.append(dist.PrefixStore(f"lockstep/{start.decode()}", store))
    if "error" in answer:
        time.sleep(READ_WITHIN_S if rank == 0 and not cluster.agent_store else 0)
        raise UserError(answer["error"])
    return answer


def _answer(everyone: list[list[Any]], decide: Callable[[], Answer]) -> Answer:
    """Compare every rank with rank 0, and decide if all are equal."""
    _, first_host, first = everyone[0]
    for rank, (_, host, other) in enumerate(everyone):
        who, who_first = f"rank {rank} on {host}", f"rank 0 on {first_host}"
        if first and other and (error := first_difference(other, first, who, who_first)):
            return {"error": error}
    try:
        return {**decide(), "hosts": [host for _, host, _ in everyone]}
    except UserError as error:
        return {"error": str(error)}


def join(cluster: Cluster, device: torch.device, timeout_s: float) -> dist.Store:
    """Create the default process group of all ranks, which meet first if they have not; one rank is a group too.

    Returns:
        A store of this start alone, as torchrun keeps its store over restarts.
    """
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)
    if cluster.world_size > 1 and not _met:
        meet(cluster, timeout_s)
    store: dist.Store = _met[-1] if cluster.world_size > 1 else dist.HashStore()  # torch's own would listen at a port
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo", store=dist.PrefixStore("group", store), rank=cluster.rank,
        world_size=cluster.world_size, timeout=timedelta(seconds=timeout_s + is_cuda * NCCL_LATER_S),
        device_id=device if is_cuda else None,
    )  # fmt: skip
    return dist.PrefixStore("errors", store)


def _open_store(cluster: Cluster, timeout_s: float) -> dist.TCPStore:
    """Connect to the store of torchrun's or Lockstep's agent, or of rank 0, which serves it here.

    It listens on the address of MASTER_ADDR alone, or on every interface if the network translates that address.
    """
    address, port, listener = cluster.master_addr, cluster.master_port or 0, None
    if cluster.rank > 0 or cluster.agent_store:
        socket.create_connection((address, port), timeout=2).close()  # torch's own would wait in silence
    else:
        try:
            family, *_, found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            try:
                listener = socket.create_server((str(found[0]), port), family=family, backlog=1024).detach()
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                listener = socket.create_server(("", port), family=family, backlog=1024).detach()
        except OSError as error:
            reason = f"rank 0 cannot serve at {address}:{port} ({error.strerror})"
            raise UserError(f"{reason}: check MASTER_ADDR and MASTER_PORT.") from None
    return dist.TCPStore(
        address, port, is_master=listener is not None, wait_for_workers=False, timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener,
    )  # fmt: skip
