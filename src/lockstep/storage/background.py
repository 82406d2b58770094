"""Threads that never get in the way: daemons of low priority, a few at a time."""

import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

LOWER_PRIORITY = 10


def in_parallel(call: Callable, arguments: Iterable[tuple], num_threads: int) -> list[Any]:
    """The results of call(*arguments), in any order; the first error is raised once all threads are idle.

    At most num_threads + 2 arguments are alive. The threads are daemons of low priority: a stuck request never
    keeps a process from ending, and training keeps its cores.
    """
    todo: queue.Queue = queue.Queue(1)
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        lower_priority()
        while (arguments := todo.get()) is not None:
            if errors:
                continue
            try:
                results.append(call(*arguments))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, name=f"s3-part-{n}", daemon=True) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        for values in arguments:
            if errors:
                break
            todo.put(values)
    except BaseException as error:
        errors.append(error)
    for _ in threads:
        todo.put(None)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def lower_priority() -> None:
    """Of this thread alone; Linux has a nice value per thread, elsewhere nothing changes."""
    if hasattr(os, "setpriority") and os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWER_PRIORITY)
