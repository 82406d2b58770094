"""Start ranks of one run on this machine, each a function call in a fresh child of a warm fork
server.

For checks that compare strategies (benchmarks, tests): with torch and Lightning imported once in
the server, a rank starts in about 0.1 s instead of 5. Training itself goes through torch's agent.
"""

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from lockstep.process.output import configure_logging
from lockstep.ranks.find import Cluster, set_rank_environment
from ranks import free_port, new_process


def local_cluster(rank: int, world_size: int, port: int, num_nodes: int = 1) -> Cluster:
    """Rank `rank` of `world_size` on this machine.

    With several nodes they are nodes in name only.
    """
    devices = world_size // num_nodes
    return Cluster(
        "supervisor", num_nodes, devices, rank // devices, rank % devices, "127.0.0.1", port
    )


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    num_nodes: int = 1,
    timeout_s: float = 300.0,
) -> list[Any]:
    """`function(cluster, *arguments)` once in each rank; the results in rank order.

    Each rank has one thread and the environment that torchrun would set. The function must be
    importable by name.

    Raises:
        RuntimeError: the first exception of any rank with its traceback, a rank that died, or the
            time is up. The other ranks are ended.
    """
    port = free_port()
    ranks: dict[Connection, tuple[int, Any]] = {}
    for rank in range(world_size):
        here, there = multiprocessing.Pipe(duplex=False)
        place = local_cluster(rank, world_size, port, num_nodes)
        process = new_process(_rank, (there, list(sys.path), function, place, arguments))
        process.start()
        there.close()
        ranks[here] = (rank, process)
    results: dict[int, Any] = {}
    try:
        while len(results) < world_size:
            waiting = {
                connection: rank for connection, (rank, _) in ranks.items() if rank not in results
            }
            ready: list[Any] = wait(waiting, timeout_s)
            if not ready:
                raise RuntimeError(
                    f"ranks {sorted(waiting.values())} said nothing for {timeout_s:.0f} s"
                )
            for connection in ready:
                rank, process = ranks[connection]
                try:
                    succeeded, results[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process.join(2)
                    raise RuntimeError(
                        f"rank {rank} of {world_size} died (exit code {process.exitcode})"
                    ) from None
                if not succeeded:
                    raise RuntimeError(f"rank {rank} of {world_size} failed:\n{results[rank]}")
        return [results[rank] for rank in range(world_size)]
    finally:
        for _, process in ranks.values():
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()


def _rank(
    connection: Connection, paths: list[str], function: Any, place: Cluster, arguments: Any
) -> None:
    sys.path[:] = paths
    set_rank_environment(place)
    configure_logging()
    import torch

    torch.set_num_threads(1)
    try:
        answer = (True, function(place, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    # Plain pickle: multiprocessing would pass tensors by file handles that die with this process.
    connection.send_bytes(pickle.dumps(answer))
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # no collective of a destructor may wait for a rank that is gone


def meet(cluster: Cluster, device_type: str = "cpu") -> None:
    """Make the default process group, once, as lockstep/ranks/process_group.py does before a run's
    strategy.
    """
    import torch.distributed as dist

    if (cluster.world_size > 1 or device_type != "cpu") and not dist.is_initialized():
        dist.init_process_group(
            "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:nccl", rank=cluster.rank,
            world_size=cluster.world_size, timeout=timedelta(seconds=60),
            init_method=f"tcp://{cluster.master_addr}:{cluster.master_port}",
        )  # fmt: skip
