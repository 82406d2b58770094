"""Loader workers end with their rank, and by its word alone."""

import multiprocessing
import subprocess
import time

from lockstep.data.streaming import _live_as_the_rank
from lockstep.runs.errors import EXIT_FAILED


def as_a_worker(ready):
    _live_as_the_rank(0)
    ready.set()
    time.sleep(60)


def test_sigterm_is_for_the_run_and_ends_a_worker_where_the_rank_sends_it():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=as_a_worker, args=(ready,), daemon=True)
    worker.start()
    assert ready.wait(30)
    for _ in range(3):
        subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    worker.join(0.3)
    assert worker.is_alive(), "as where a scheduler signals the whole group"
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == EXIT_FAILED
