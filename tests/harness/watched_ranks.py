"""Ranks that do nothing but watch over each other while one of them fails: what tests of the watch start."""

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ranks import free_port, new_process


def start(scenario: Callable[[int], Any], world_size: int, folder: Path, timeout_s: float = 60.0) -> "Ranks":
    """One process per rank that calls scenario(rank) under a Watch; scenarios are the functions below."""
    port = free_port()
    processes = [
        new_process(target=_rank, args=(scenario, rank, world_size, port, str(folder), timeout_s, list(sys.path)))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return Ranks(processes, folder)


class Ranks:
    def __init__(self, processes: list[Any], folder: Path) -> None:
        self.processes, self.folder = processes, folder

    def wait(self, ranks: list[int], timeout_s: float = 60.0) -> float:
        """Until these have ended; returns the seconds from the fault, which writes the file `fault`."""
        deadline = time.monotonic() + timeout_s
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
            assert self.processes[rank].exitcode is not None, f"rank {rank} never ended"
        return time.monotonic() - float((self.folder / "fault").read_text())

    def code(self, rank: int) -> int:
        return self.processes[rank].exitcode

    def culprit(self, rank: int) -> dict[str, Any] | None:
        return json.loads((self.folder / f"error-rank{rank}.json").read_text())

    def stack(self, rank: int) -> str:
        return (self.folder / f"stack-rank{rank}.txt").read_text()

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(scenario, rank, world_size, port, folder, timeout_s, paths) -> None:
    sys.path[:] = paths
    import torch
    import torch.distributed as dist

    from lockstep.callbacks import heartbeat as module
    from lockstep.callbacks.heartbeat import Watch
    from lockstep.distributed.cluster import Cluster
    from lockstep.distributed.process_group import join, own_connection
    from lockstep.runs.errors import Interrupted

    module.GRACE_S, module.SILENT_AFTER_S, module.LEAVE_TOGETHER_S = 1.0, 2.0, 4.0
    module.BEAT_INTERVAL_S = 0.2
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    place = Cluster("nodes", 1, world_size, 0, rank, "127.0.0.1", port)
    name = join(place, torch.device("cpu"), 30.0)
    watch = Watch(folder, timeout_s)
    watch.phase = "training"
    watch.begin(own_connection(place, name, 5.0), rank, world_size, None)
    code = 0
    try:
        dist.barrier()
        time.sleep(0.5)
        functools.partial(scenario, folder=Path(folder))(rank)
        dist.barrier()
    except BaseException as error:
        explained = watch.explain(error)
        code = 75 if isinstance(explained, Interrupted) else 1
        if explained.culprit:
            Path(folder, f"error-rank{rank}.json").write_text(json.dumps(explained.culprit))
    watch.end()
    os._exit(code)


def _fault(folder: Path) -> None:
    (folder / "fault").write_text(str(time.monotonic()))


def never_returns() -> None:
    """The stand-in for NCCL, which blocks for ever in a collective whose peer is gone."""
    threading.Event().wait()


def collective(forever: bool = True) -> None:
    import torch
    import torch.distributed as dist

    while True:
        dist.all_reduce(torch.zeros(1))


def raises(rank: int, folder: Path, who: int = 1, others: Callable = never_returns) -> None:
    if rank == who:
        _fault(folder)
        raise ValueError("the culprit")
    others()


def gets_signal(
    rank: int, folder: Path, who: int = 1, number: int = signal.SIGKILL, others: Callable = never_returns
) -> None:
    if rank == who:
        _fault(folder)
        os.kill(os.getpid(), number)
    others()


def is_stopped_at_the_start(rank: int, folder: Path, who: int = 1) -> None:
    from lockstep.runs.errors import Interrupted

    if rank == who:
        _fault(folder)
        raise Interrupted("SIGTERM")
    collective()


def stops_together(rank: int, folder: Path) -> None:
    """All have agreed to stop; rank 0 still has to upload."""
    from lockstep.runs.errors import Interrupted

    stop = Interrupted("SIGTERM")
    stop.agreed = True
    if rank == 0:
        time.sleep(1.5)
        _fault(folder)
    raise stop


def finishes(rank: int, folder: Path) -> None:
    _fault(folder)
