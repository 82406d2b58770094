"""Run a function in several gloo ranks, forked from a server that has torch and Lightning imported already.

    results = run_ranks(function, world_size=2, argument, ...)     # one result per rank, in order

`function(*arguments)` must be importable by name (module level) and its results picklable.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

PRELOAD = ["torch.utils.tensorboard", "lightning.pytorch", "torchvision", "timm", "hydra", "boto3",
           "lockstep.launch.launcher", "lockstep.launch.agent", "lockstep.training.build",
           "lockstep.data.image_datamodule", "lockstep.callbacks.throughput", "lockstep.logbook.build",
           "matplotlib.figure", "omegaconf._impl"]  # fmt: skip
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)
SRC = Path(__file__).resolve().parents[2] / "src"


def new_process(target: Callable, args: tuple) -> multiprocessing.Process:
    """Forked from the server, which imports this tree's code and not that of the tree that is installed."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH")]))):
        forkserver.ensure_running()
    return _context.Process(target=target, args=args)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank_main(queue, function, rank, world_size, port, distributed, paths, arguments) -> None:
    sys.path[:] = paths
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    try:
        if distributed:
            torch.distributed.init_process_group(
                "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
            )
        queue.put((rank, True, function(*arguments)))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)


def run_ranks(
    function: Callable, world_size: int, *arguments: Any, distributed: bool = True, timeout_s: float = 120
) -> list[Any]:
    """One result per rank, in rank order; an exception in any rank is raised here with its traceback.

    Args:
        distributed: initialise a gloo process group first (else only the environment is set).
    """
    port = free_port()
    queue = _context.Queue()
    processes = [
        new_process(
            target=_rank_main, args=(queue, function, rank, world_size, port, distributed, list(sys.path), arguments)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, ok, value = queue.get(timeout=timeout_s)
            if not ok:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world_size)]
