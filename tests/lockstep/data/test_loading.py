"""Workers that load batches, and the images that a node keeps."""

import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import loading, node_cache
from lockstep.data.batches import Selection
from lockstep.data.framing import Framing
from lockstep.data.node_cache import META, load_or_build
from lockstep.process import environment
from lockstep.process.errors import DiskFullError, UserError

PROGRAM = """
import multiprocessing, os, signal, time, numpy as np
from PIL import Image
from lockstep.data.batches import Selection
from lockstep.data.framing import Framing
from lockstep.data.loading import Samples, load_pixels
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def open_sample(position):
    return (Image.new("L", (2, 2), position),)
selections = [Selection(np.array([i, i]), np.zeros((1, 2), np.int64)) for i in range(50)]
batches = load_pixels(Samples(open_sample, Framing(2, 2), num_workers=2), selections)
def show():
    print(next(batches)[1][0].sum().item(), flush=True)
show()
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": "src"}


@pytest.mark.slow
def test_workers_ignore_a_signal_to_the_whole_job():
    """As SLURM sends it: to every process.

    The rank goes on, and its exit does not wait for its workers.
    """
    program = PROGRAM + "os.killpg(0, signal.SIGTERM)\ntime.sleep(0.5)\nshow()"
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.split() == ["0", "8"], done.stdout + done.stderr
    assert "Traceback" not in done.stderr and time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("stated", "device", "cores", "ranks", "bound", "wanted"),
    [("auto", "cuda", 64, "4", "", 14), ("auto", "cuda", 4, "4", "", 1), ("auto", "cpu", 64, "2", "", 4),
     (0, "cuda", 64, "1", "", 0), (32, "cpu", 2, "1", "", 32),
     ("auto", "cuda", 8, "4", "8", 6), ("auto", "cuda", 32, "4", "8", 6), ("auto", "cuda", 64, "4", "8", 6),
     ("auto", "cpu", 64, "1", "2", 2)],
)  # fmt: skip
def test_workers_follow_the_cores_of_a_rank(
    stated, device, cores, ranks, bound, wanted, monkeypatch
):
    """SLURM has bound a task to `bound` cores, or lets it see those of all."""
    monkeypatch.setattr(environment, "available_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    for name, value in (
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": bound}.items() if bound else ()
    ):
        monkeypatch.setenv(name, value)
    assert loading.choose_num_workers(stated, torch.device(device)) == wanted


@pytest.mark.parametrize(
    ("masks", "tasks", "wanted"),
    [("0xFF,0xFF00", "2", 8), ("0xFF", "2", 4), ("0xFF,0xFF", "2", 4), ("", "2", 4), ("", "1", 8)],
)
def test_a_task_keeps_the_cores_that_slurm_binds(masks, tasks, wanted, monkeypatch):
    """As `--cpus-per-gpu=8` binds it, which sets no SLURM_CPUS_PER_TASK."""
    monkeypatch.setattr(environment, "available_cores", lambda: 8)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", tasks)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_CPU_BIND_LIST", masks)
    assert environment.cores_of_rank() == wanted


@pytest.mark.parametrize("free", [0, 2**40])
def test_batches_arrive_with_and_without_shared_memory(free, monkeypatch):
    monkeypatch.setattr(loading, "free_shared_memory", lambda: free)
    samples = loading.Samples(
        lambda i: (Image.new("L", (2, 2), 3 + i),), Framing(2, 2), num_workers=1
    )
    selections = [
        Selection(np.array([i] * (i != 1), int), np.zeros((3, int(i != 1)), int)) for i in range(3)
    ]
    _, [handed_over] = samples[selections[0]]
    assert isinstance(handed_over, torch.Tensor if free else np.ndarray)
    found = [pixels[0] for _, pixels in loading.load_pixels(samples, selections)]
    assert [(len(images), images.unique().tolist()) for images in found] == [
        (1, [3]),
        (0, []),
        (1, [5]),
    ]


# Built once per node, complete or not there.


def build_slowly(part: Path):
    with (part.parent / "builds.txt").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    (part / "data.bin").write_bytes(b"x" * 100)
    return {"built_by": os.getpid()}


def test_one_of_several_builds_and_all_get_it(tmp_path):
    """The lock belongs to an open file, so threads stand for processes.

    A killed build left its folder.
    """
    part = tmp_path / f".entry.{socket.gethostname()}.part"
    part.mkdir()
    (part / "stale.bin").write_bytes(b"old")
    with ThreadPoolExecutor(3) as pool:
        results = list(
            pool.map(lambda _: load_or_build(tmp_path / "entry", build_slowly), range(3))
        )
    assert (
        results == [{"built_by": os.getpid()}] * 3
        and len((tmp_path / "builds.txt").read_text().split()) == 1
    )
    assert sorted(path.name for path in (tmp_path / "entry").iterdir()) == ["data.bin", META]


def test_two_nodes_whose_locks_do_not_meet_share_no_part(tmp_path, monkeypatch):
    monkeypatch.setattr(node_cache, "_hold_lock", lambda folder: contextlib.nullcontext())

    def build(part):
        (part / "data.bin").write_bytes(b"whole")
        return {"by": "the other node"}

    def build_slowly_here(part):
        (part / "data.bin").write_bytes(b"who")
        monkeypatch.setattr(node_cache.socket, "gethostname", lambda: "another")
        load_or_build(tmp_path / "entry", build)
        (part / "data.bin").write_bytes(b"whole")
        return {"by": "this node"}

    assert load_or_build(tmp_path / "entry", build_slowly_here) == {"by": "the other node"}
    assert (tmp_path / "entry" / "data.bin").read_bytes() == b"whole"


@pytest.mark.parametrize(("is_whole", "kept"), [(True, b"theirs"), (False, b"ours")])
def test_a_folder_of_another_node_stays_if_whole(tmp_path, monkeypatch, is_whole, kept):
    entry = tmp_path / "entry"
    entry.mkdir()
    (entry / "data.bin").write_bytes(b"theirs")
    if is_whole:
        (entry / META).write_text("{}")

    def build(part):
        (part / "data.bin").write_bytes(b"ours")
        return {}

    node_cache._build(entry, build)
    assert (entry / "data.bin").read_bytes() == kept


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(part):
        (part / "data.bin").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(
        DiskFullError, match="no room on .*: give data.cache_dir=FOLDER on a larger disk"
    ):
        load_or_build(tmp_path / "entry", build)
    assert [path.name for path in tmp_path.iterdir()] == ["entry.lock"]


def test_a_folder_without_room_names_data_cache_dir(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def refuse_part(path, *arguments, **options):
        if path.suffix == ".part":
            raise OSError(errno.ENOSPC, "full", str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse_part)
    with pytest.raises(DiskFullError, match="data.cache_dir=FOLDER"):
        load_or_build(tmp_path / "entry", build_slowly)


def test_an_error_of_a_build_keeps_its_cause(tmp_path):
    def build(part):
        raise RuntimeError("no images") from ValueError("the reason")

    with pytest.raises(RuntimeError) as raised:
        load_or_build(tmp_path / "entry", build)
    assert str(raised.value.__cause__) == "the reason"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written or locked .*data.cache_dir"):
        load_or_build(tmp_path / "file" / "entry", build_slowly)


def test_a_large_new_folder_says_what_the_cache_takes(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(node_cache, "LARGE_BYTES", 10_000)

    def build(size):
        return lambda folder: {"bytes": (folder / "images").write_bytes(b"1" * size)}

    load_or_build(tmp_path / "small", build(100))
    assert "holds" not in caplog.text
    for _ in range(2):
        load_or_build(tmp_path / "large", build(300_000))
    assert caplog.text.count(f"{tmp_path} holds 0.0 GB of prepared images in 2 folders") == 1


def test_workers_that_cannot_start_leave_signals_unblocked(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "no memory to fork")

    monkeypatch.setattr(loading, "DataLoader", refuse)
    selection = Selection(np.arange(2), np.zeros((2, 1), np.int64))
    samples = loading.Samples(None, None, num_workers=1)
    with pytest.raises(OSError, match="no memory"):
        list(loading.load_pixels(samples, [selection]))
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_at_exit_only_the_workers_of_loaders_are_killed():
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    other.start()
    samples = loading.Samples(lambda i: (Image.new("L", (2, 2), i),), Framing(2, 2), num_workers=1)
    selections = [Selection(np.array([i]), np.zeros((3, 1), int)) for i in range(2)]
    handler = signal.getsignal(signal.SIGCHLD)
    batches = loading.load_pixels(samples, selections)
    next(batches)
    [worker] = {*multiprocessing.active_children()} - {other}
    try:
        loading._kill_workers()
        worker.join(30)
        assert worker.exitcode == -signal.SIGKILL and other.is_alive()
    finally:
        batches.close()
        signal.signal(signal.SIGCHLD, handler)
        other.kill()
        other.join()


def test_workers_share_the_list_where_python_has_a_fork_server():
    """Python 3.14 pickles it for each worker; a function within a function cannot be pickled."""

    def open_sample(position):
        return (Image.new("L", (2, 2), position),)

    selections = [Selection(np.array([i]), np.zeros((1, 1), np.int64)) for i in (3, 4)]
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        batches = loading.load_pixels(
            loading.Samples(open_sample, Framing(2, 2), num_workers=1), selections
        )
        assert [int(pixels[0].max()) for _, pixels in batches] == [3, 4]
    finally:
        multiprocessing.set_start_method(before, force=True)
