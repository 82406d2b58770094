"""Which rank failed first: the ranks publish their errors in the run's store.

A rank that dies or hangs publishes nothing, but breaks a collective of every other rank: whoever stays silent then is
the one to name.
"""

import json
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.launch.failures import RankError, message_of
from lockstep.launch.launchers import Cluster
from lockstep.runs.errors import Diverged, Interrupted, UserError

ANSWER_S = 6.0  # for the other ranks to publish their error, or that they have lost a peer
ERROR = "first-error"
OF_THE_NETWORK = ("connection closed", "connection reset", "broken pipe", "timed out", "timeout", "gloo", "nccl")


def lost_a_peer(error: BaseException) -> bool:
    """Return whether a collective broke because of another rank, by the words of gloo, NCCL and the store."""
    if isinstance(error, dist.DistError):
        return True
    is_own = isinstance(error, UserError | Diverged) or not isinstance(error, RuntimeError)
    return not is_own and any(words in str(error).lower() for words in OF_THE_NETWORK)


def first_error(error: BaseException, store: dist.Store, cluster: Cluster, hosts: list[str]) -> RankError:
    """Publish this rank's error, and return the first one of the run; of all ranks together it takes ANSWER_S.

    Args:
        hosts: the name of each rank's host.
    """
    phase, timed_out = getattr(error, "phase", "start"), "time" in str(error).lower()

    def facts(rank: int, message: str, kind: str) -> RankError:
        host = hosts[rank] if hosts else socket.gethostname()
        return {"rank": rank, "host": host, "phase": phase, "message": message, "kind": kind, "time": time.time()}

    own = facts(cluster.rank, message_of(error), type(error).__name__)
    others = [rank for rank in range(cluster.world_size) if rank != cluster.rank]
    try:
        store.set_timeout(timedelta(seconds=ANSWER_S))
        if not lost_a_peer(error):
            own = json.loads(store.compare_set(ERROR, "", json.dumps(own)))
            if cluster.rank == 0:  # this process may hold the store: the others read it first
                _wait(store, [f"lost-peer/{rank}" for rank in others])
            return own
        store.set(f"lost-peer/{cluster.rank}", "")
        if not _wait(store, [ERROR]):
            silent = [rank for rank in others if not store.check([f"lost-peer/{rank}"])]
            if silent:
                what = "hangs: the other ranks waited for it" if timed_out else "died or was cut off without an error"
                stack = f"; see stack-rank{silent[0]}.txt" if timed_out else ""
                own = facts(silent[0], what + stack, "hangs" if timed_out else "lost")
        return json.loads(store.compare_set(ERROR, "", json.dumps(own)))
    except (RuntimeError, dist.DistError):
        return facts(0, "died or was stopped, or its host or network: its store is gone", "lost")


def _wait(store: dist.Store, keys: list[str]) -> bool:
    deadline = time.monotonic() + ANSWER_S
    while not (found := store.check(keys)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def explained(error: BaseException, store: Any, cluster: Cluster, hosts: list[str]) -> BaseException:
    """Return what the exception of a rank means: itself, with `culprit`, or Interrupted if another rank was stopped."""
    if isinstance(error, Interrupted) and error.agreed or hasattr(error, "culprit"):
        return error
    culprit = first_error(error, store, cluster, hosts)
    if culprit["kind"] == "Interrupted" and not isinstance(error, Interrupted):
        stop = Interrupted("another rank was asked to stop")
        stop.elsewhere, stop.__cause__ = True, error
        return stop
    error.culprit = culprit  # type: ignore[attr-defined]
    return error
