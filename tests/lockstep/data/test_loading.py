"""Loader workers ignore signals to the whole job, follow the cores, and need no shared memory."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import loading
from lockstep.data.batches import Selection
from lockstep.data.framing import Framing

PROGRAM = """
import multiprocessing, os, signal, time, numpy as np
from PIL import Image
from lockstep.data.batches import Selection
from lockstep.data.framing import Framing
from lockstep.data.loading import Samples, stream
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def open_sample(position):
    return (Image.new("L", (2, 2), position),)
selections = [Selection(np.array([i, i]), np.zeros((1, 2), np.int64)) for i in range(50)]
batches = stream(Samples(open_sample, Framing(2, 2), num_workers=2), selections)
def show():
    print(next(batches)[1]["pixels"][0].sum().item(), flush=True)
show()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": "src"}


@pytest.mark.slow
def test_a_signal_to_the_whole_job_leaves_the_workers_to_the_rank():
    """As SLURM sends it: to every process. The rank goes on, and its exit does not wait for its workers."""
    program = PROGRAM + "os.killpg(0, signal.SIGTERM)\ntime.sleep(0.5)\nshow()"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split() == ["0", "8"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr and time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("stated", "device", "cores", "ranks", "wanted"),
    [("auto", "cuda", 64, "4", 14), ("auto", "cuda", 4, "4", 1), ("auto", "cpu", 64, "2", 4), (0, "cuda", 64, "1", 0)],
)
def test_workers_follow_the_cores_of_a_rank(stated, device, cores, ranks, wanted, monkeypatch):
    monkeypatch.setattr(loading, "available_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert loading.workers_of(stated, torch.device(device)) == wanted


@pytest.mark.parametrize("free", [0, 2**40])
def test_batches_arrive_with_and_without_shared_memory(free, monkeypatch):
    monkeypatch.setattr(loading, "free_shared_memory", lambda: free)
    samples = loading.Samples(lambda i: (Image.new("L", (2, 2), 3 + i),), Framing(2, 2), num_workers=1)
    selections = [Selection(np.array([i] * (i != 1), int), np.zeros((3, int(i != 1)), int)) for i in range(3)]
    _, [handed_over] = samples[selections[0]]
    assert isinstance(handed_over, torch.Tensor if free else np.ndarray)
    found = [batch["pixels"][0] for _, batch in loading.stream(samples, selections)]
    assert [(len(images), images.unique().tolist()) for images in found] == [(1, [3]), (0, []), (1, [5])]
