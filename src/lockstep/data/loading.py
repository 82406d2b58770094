"""Load the images of batches in worker processes, and copy them to a GPU ahead of time."""

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
from lockstep.process.environment import cores_of_rank, cores_of_task
from lockstep.process.errors import UserError

LoadedBatch = dict[str, Any]
"""`targets` by name; `pixels` of images and each mask, (n, side, side, channels), or `index`
into the device's arrays; `draws` (3, n) unless the images are augmented already; `mixing` where
images are mixed; `inputs` by name where there are numbers beside the images."""
OpenSample = Callable[[int], tuple[Any, ...]]
"""position → the whole image (Pillow's, RGB or L, or torchvision's) and its masks (Mask)"""


@dataclass
class Samples(Dataset):
    """The pixels of selections as worker processes make them.

    They are (n, [views,] side, side, channels) uint8, or float32 from 0 to 255 of deep images.

    Args:
        pipeline: augments images one by one; None: the device crops resize × resize pixels.
    """

    open_sample: OpenSample
    framing: Framing
    pipeline: Operation | None = None
    num_workers: int = 0

    def __getitem__(self, selection: Selection) -> tuple[Selection, list[Any]] | UserError:
        # An empty selection opens the first image, for its shape.
        positions = selection.positions.tolist() or [0]
        draws = selection.draws.T.tolist() or [[]]
        try:
            samples = [self._pixels(*pair) for pair in zip(positions, draws, strict=True)]
        except UserError as error:
            # Raised here it would carry the worker's traceback.
            return error
        arrays = [np.stack(part)[: len(selection.positions)] for part in zip(*samples)]

        # A worker that finds no shared memory (64 MB in a container by default) fails without a
        # word to the loader. Arrays go through a pipe, more slowly.
        needed = (self.num_workers + 1) * sum(array.nbytes for array in arrays)
        if free_shared_memory() > needed:
            return selection, [torch.from_numpy(array) for array in arrays]
        return selection, arrays

    def _pixels(self, position: int, draws: list[int]) -> list[np.ndarray]:
        sample = self.open_sample(position)
        if self.pipeline is None:
            return [pixels_of(self.framing.square(part)) for part in sample]

        views = []
        for seed in draws:
            with torch.random.fork_rng(devices=[]):
                # torch.manual_seed would seed the GPU's generator as well.
                torch.default_generator.manual_seed(seed)
                moved = self.pipeline(sample if len(sample) > 1 else sample[0])
            parts = moved if len(sample) > 1 else (moved,)
            views.append([pixels_of(part) for part in parts])
        if len(views) == 1:
            return views[0]
        return [np.stack(part) for part in zip(*views)]


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
    return max(1, min(4, cores_of_task()))


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
    first = next(selections, None)
    if first is None:
        return
    # It differs by seed, epoch and rank. The global stream is the one that a resume restores.
    seed = zlib.crc32(first.positions.tobytes() + first.draws.tobytes())
    batches = _start_workers(samples, itertools.chain([first], selections), pin_memory, seed)
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            selection, pixels = batch
            yield selection, {"pixels": [torch.as_tensor(part) for part in pixels]}
    finally:
        # The workers end now. An error's traceback would keep them, and the program's end would
        # wait for them.
        del batches


def _start_workers(
    samples: "Samples", selections: Iterable[Selection], pin_memory: bool, seed: int
) -> Iterator[Any]:
    # Workers are born with these blocked: a signal to all processes of a job is for the rank, which
    # saves first.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        return _loader_iterator(samples, selections, pin_memory, seed)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _loader_iterator(
    samples: "Samples", selections: Iterable[Selection], pin_memory: bool, seed: int
) -> Iterator[Any]:
    with warnings.catch_warnings():
        # Every DataLoader forks beside idle threads, of which Python 3.12 warns.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        # A network disk needs more workers than there are cores.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            samples,
            batch_size=None,
            sampler=selections,
            collate_fn=_unchanged,
            num_workers=samples.num_workers,
            pin_memory=pin_memory,
            multiprocessing_context=start_method(samples.num_workers),
            generator=torch.Generator().manual_seed(seed),
        )
        return iter(loader)


@atexit.register
def _kill_workers() -> None:
    """Run before multiprocessing's exit handler, which waits for workers that ignore SIGTERM."""
    workers = [process for process in multiprocessing.active_children() if process.daemon]
    if workers:
        # torch's handler would report them as failed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()


def _unchanged(batch: Any) -> Any:
    """Return the batch; a worker that is not forked imports this by its name."""
    return batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all epochs.

    torch has 32, and never gives memory that one has freed to another.
    """
    return torch.cuda.Stream(device)


def prefetch(batches: Iterator[dict[str, Any]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield each batch on a GPU. A thread makes the next one meanwhile and copies it on a stream.

    Args:
        batches: dicts with tensors in CPU memory, pinned where they are large.
    """
    stream = _copy_stream(device)

    def copy_next() -> dict[str, Any] | None:
        # The context also sets the stream's device, which pinned memory belongs to.
        with torch.cuda.stream(stream):
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
