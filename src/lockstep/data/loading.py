"""Make batches of images that lie in files, in DataLoader worker processes, and copy them to a GPU ahead of time."""

import atexit
import functools
import itertools
import multiprocessing
import shutil
import signal
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader, Dataset

from lockstep.data.augmentation import Operation
from lockstep.data.batches import Selection
from lockstep.data.decoding import pixels_of
from lockstep.data.framing import Framing
from lockstep.process.environment import available_cores, cores_of_rank
from lockstep.process.errors import UserError

LoadedBatch = dict[str, Any]
"""`targets` by name; `pixels` of images and each mask, (n, side, side, channels) uint8, or `index` into the device's
arrays; `draws` (3, n) unless the images are augmented already; `mixing` where images are mixed."""
OpenSample = Callable[[int], tuple[Any, ...]]
"""position → the whole image (Pillow's, RGB or L) and its masks (torchvision's Mask)"""


@dataclass
class Samples(Dataset):
    """The pixels of selections, (n, [views,] side, side, channels) uint8, as worker processes make them."""

    open_sample: OpenSample
    framing: Framing
    pipeline: Operation | None = None  # augments images one by one; None: the device crops resize × resize pixels
    num_workers: int = 0

    def __getitem__(self, selection: Selection) -> tuple[Selection, list[Any]] | UserError:
        positions = selection.positions.tolist() or [0]  # no position: the first image, for its shape
        try:
            samples = [self._pixels(*each) for each in zip(positions, selection.draws.T.tolist() or [[]], strict=True)]
        except UserError as error:  # raised here it would carry the worker's traceback
            return error
        found = [np.stack(each)[: len(selection.positions)] for each in zip(*samples)]
        # A worker that finds no shared memory (64 MB in a container by default) fails without a word to the loader:
        # arrays go through a pipe, more slowly.
        needed = (self.num_workers + 1) * sum(each.nbytes for each in found)
        return selection, list(map(torch.from_numpy, found)) if free_shared_memory() > needed else found

    def _pixels(self, position: int, draws: list[int]) -> list[np.ndarray]:
        sample, views = self.open_sample(position), []
        if self.pipeline is None:
            return [pixels_of(self.framing.square(each)) for each in sample]
        for seed in draws:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPU's generator as well
                moved = self.pipeline(sample) if len(sample) > 1 else (self.pipeline(sample[0]),)
            views.append([pixels_of(each) for each in moved])
        return views[0] if len(views) == 1 else [np.stack(each) for each in zip(*views)]


def workers_of(requested: int | str, device: torch.device) -> int:
    """Return how many worker processes load the images of this rank.

    Args:
        requested: a number, which may exceed the cores, as network disks need it; "auto": on a GPU
            the cores of this rank but two, up to 16, else up to 4.
    """
    if requested != "auto":
        return int(requested)
    if device.type == "cuda":
        return max(1, min(16, cores_of_rank() - 2))
    return max(1, min(4, available_cores()))


def start_method(num_workers: int) -> str | None:
    """Return how workers are started: by fork on Linux; None: as Python does by default.

    Python 3.14 starts a fork server there. Each worker would import torch in every epoch, get the
    whole list of files through a pipe, and have no signals blocked.
    """
    if num_workers and sys.platform == "linux":
        return "fork"
    return None


def free_shared_memory() -> int:
    """Return the bytes in which worker processes can hand over tensors."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def stream(
    samples: Samples, selections: Iterable[Selection], *, pin_memory: bool = False
) -> Iterator[tuple[Selection, LoadedBatch]]:
    """Yield each selection with its pixels, in order; workers prepare some batches ahead.

    Raises:
        UserError: names an image that cannot be read or decoded.
    """
    selections = iter(selections)
    if (first := next(selections, None)) is None:
        return
    seed = zlib.crc32(first.positions.tobytes() + first.draws.tobytes())  # differs by seed, epoch and rank
    loader = DataLoader(
        samples, batch_size=None, sampler=itertools.chain([first], selections), collate_fn=_unchanged,
        num_workers=samples.num_workers, pin_memory=pin_memory,
        multiprocessing_context=start_method(samples.num_workers),
        generator=torch.Generator().manual_seed(seed),  # not the global stream, which a resume restores
    )  # fmt: skip
    # Workers are born with these blocked: a signal to all processes of a job is for the rank, which saves first.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with warnings.catch_warnings():  # forking beside idle threads is what every DataLoader does; Python 3.12 warns
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        batches = iter(loader)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        for found in batches:
            if isinstance(found, UserError):
                raise found
            selection, pixels = found
            yield selection, {"pixels": list(map(torch.as_tensor, pixels))}
    finally:
        del batches  # ends the workers now: an error's traceback would keep them, and the program's end wait for them


@atexit.register
def _kill_workers() -> None:
    """Run before multiprocessing's own exit handler, which would wait for workers that ignore SIGTERM."""
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report them as failed
    for worker in workers:
        worker.kill()


def _unchanged(batch: Any) -> Any:  # by name: a worker that is not forked imports it
    return batch


@functools.cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all epochs: torch has 32, and never gives memory that one has freed to another."""
    return torch.cuda.Stream(device)


def prefetched(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield each batch on a GPU; a thread makes its successor meanwhile and copies it on a stream of its own.

    Args:
        batches: dicts with tensors in CPU memory, pinned where they are large.
    """
    stream = _copying(device)

    def copy_next() -> dict[str, Any] | None:
        with torch.cuda.stream(stream):  # and its device, which pinned memory belongs to
            batch = next(batches, None)
            return None if batch is None else move_data_to_device(batch, device)

    with ThreadPoolExecutor(1, "next batch") as thread:
        coming = thread.submit(copy_next)
        while (batch := coming.result()) is not None:
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(stream)
            coming = thread.submit(copy_next)
            # Its memory is not given to a later copy before the step is done with it.
            apply_to_collection(batch, torch.Tensor, torch.Tensor.record_stream, computing)
            yield batch
