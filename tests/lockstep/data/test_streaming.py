"""Loader workers ignore signals to the whole job and end with their rank."""

import os
import signal
import subprocess
import sys
import time

import psutil

PROGRAM = """
import os, time, numpy as np
from lockstep.data.batches import Selection
from lockstep.data.streaming import stream
def make(position, draw):
    return np.full((2, 2, 1), position, np.uint8)
selections = [Selection(np.array([i, i]), np.zeros((1, 2), np.int64)) for i in range(50)]
batches = stream(selections, make, num_workers=2)
print(next(batches)[1].sum().item(), flush=True)
os.killpg(0, SIGNAL)
time.sleep(0.5)
print(next(batches)[1].sum().item(), flush=True)
"""


def test_a_signal_to_the_whole_job_leaves_the_workers_to_the_rank():
    """As SLURM sends it: to every process. The rank goes on, and its exit does not wait for its workers."""
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + PROGRAM.replace(
        "SIGNAL", "signal.SIGTERM"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": "src"}, capture_output=True, text=True,
        timeout=60, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split() == ["0", "8"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr and time.monotonic() - started < 30


def test_the_workers_of_a_killed_rank_end():
    waits = (
        "import multiprocessing; print(*[p.pid for p in multiprocessing.active_children()], flush=True); time.sleep(60)"
    )
    program = PROGRAM.replace("os.killpg(0, SIGNAL)", waits)
    with subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": "src"}, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        workers = [int(pid) for pid in rank.stdout.readline().split()]
        rank.send_signal(signal.SIGKILL)
    assert len(workers) == 2
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in workers if psutil.pid_exists(pid)], timeout=20)
    assert not alive, "they outlived the rank"
