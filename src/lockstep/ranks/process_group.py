"""Create process groups: all ranks of a start, or none of them.

A rank that creates a group waits inside of torch for the others, where it hears no signal. If one
of them were stopped before it comes, the rank would wait until it is killed.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from lockstep.process import signals
from lockstep.process.errors import Interrupted
from lockstep.ranks.find import Cluster
from lockstep.ranks.meeting import (
    POLL_INTERVAL_S,
    Meeting,
    get_last_meeting,
    let_others_read,
    meet,
)

# NCCL's timeout aborts the process, gloo's raises an exception. The default group has this much
# more time than the gloo groups of votes, which therefore time out first.
NCCL_GRACE_S = 15.0
# The decisions of ranks that meet in all_or_none. A third one is the number of a node that was
# asked to stop.
GO = "go"
TOO_LATE = "too late"


def create_process_group(
    cluster: Cluster, device: torch.device, timeout_s: float, *, several_devices: bool = False
) -> dist.Store:
    """Create the default process group of all ranks, which meet first if they have not.

    One rank is a group too.

    Args:
        device: the device of this rank.
        several_devices: this rank has further devices, and `device` is the first one.

    Returns:
        The store of this start alone, as torchrun keeps its store over restarts.

    Raises:
        Interrupted: a rank was asked to stop.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        timeout_s += NCCL_GRACE_S
    # NCCL refuses tensors of another device than the one that it is bound to.
    bound_device = None
    if device.type == "cuda" and not several_devices:
        bound_device = device

    if cluster.world_size == 1:
        # torch's own store would listen at a port.
        store = dist.HashStore()
        _create_group(cluster, device, timeout_s, store, bound_device)
        return store

    meeting = get_last_meeting() or meet(cluster, timeout_s)
    with all_or_none():
        _create_group(cluster, device, timeout_s, meeting.store, bound_device)
    return meeting.store


def _create_group(
    cluster: Cluster,
    device: torch.device,
    timeout_s: float,
    store: dist.Store,
    bound_device: torch.device | None,
) -> None:
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=dist.PrefixStore("group", store),
        rank=cluster.rank,
        world_size=cluster.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=bound_device,
    )


@contextmanager
def all_or_none() -> Iterator[None]:
    """Let all ranks enter the block, in which they create a process group, or none of them.

    A signal that comes in the block waits until it is over. Ranks that have not met, as those of a
    plain script, just enter it.

    Raises:
        Interrupted: before the block, on all ranks, if one was asked to stop; after it, on a rank
            that was asked in the meantime.
        RuntimeError: before the block, because another rank has failed or does not come in time.
    """
    meeting = get_last_meeting()
    if meeting is None:
        yield
        return
    with signals.defer_signals():
        _agree_to_go_on(meeting)
        yield


def has_heartbeat() -> bool:
    """Return whether the ranks watch over each other; those of a plain script do not."""
    meeting = get_last_meeting()
    return meeting is not None and meeting.heartbeat is not None


def wait_for_all() -> None:
    """Wait until every rank has come here, where they watch over each other.

    A collective would wait for a frozen rank until its timeout.

    Raises:
        LostRank: a rank gives no sign of life.
    """
    meeting = get_last_meeting()
    if meeting is not None and meeting.heartbeat is not None:
        meeting.heartbeat.wait_for_all()


def _agree_to_go_on(meeting: Meeting) -> None:
    """Wait until all ranks are here, or one was asked to stop; the first of both decides."""
    cluster = meeting.cluster
    meeting.agreements += 1
    store = dist.PrefixStore(f"agreement/{meeting.agreements}", meeting.store)
    try:
        decision = _agree_on_decision(meeting, store)
    except dist.DistError:
        raise RuntimeError("connection closed: the store of rank 0 is gone") from None
    if decision == GO:
        return
    if decision == TOO_LATE:
        raise RuntimeError("timed out: another rank does not begin")

    let_others_read(cluster)
    reason = "another rank was asked to stop"
    if signals.received:
        reason = signals.first_signal_name()
    stop = Interrupted(reason)
    stop.is_agreed = True
    stop.is_of_other_nodes = int(decision) != cluster.node_rank and not signals.received
    raise stop


def _agree_on_decision(meeting: Meeting, store: dist.Store) -> str:
    """Return what all ranks do: GO, TOO_LATE, or the number of the node that was asked to stop."""
    cluster = meeting.cluster
    deadline = time.monotonic() + meeting.timeout_s
    store.add("arrived", 1)
    # The first proposal is the decision: compare_set does not replace it, as "" means no value yet.
    while not store.check(["decision"]):
        if signals.received:
            store.compare_set("decision", "", str(cluster.node_rank))
        elif meeting.errors.check(["first"]):
            # The rank that failed may have arrived before.
            raise RuntimeError("connection closed: another rank has failed")
        elif store.add("arrived", 0) == cluster.world_size:
            store.compare_set("decision", "", GO)
        elif time.monotonic() > deadline:
            store.compare_set("decision", "", TOO_LATE)
        else:
            time.sleep(POLL_INTERVAL_S)
    return store.get("decision").decode()
