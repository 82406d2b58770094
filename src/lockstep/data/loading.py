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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.augmentation import Operation
from lockstep.data.batches import Selection
from lockstep.data.decoding import to_array
from lockstep.data.framing import Framing
from lockstep.process.environment import cores_of_rank, cores_of_task
from lockstep.process.errors import UserError

OpenSample = Callable[[int], tuple[Any, ...]]
"""A function of a position, which returns the whole image and its masks as Source.open does."""
# The worker processes of all loaders. They are killed when this process exits.
_workers: WeakSet[BaseProcess] = WeakSet()


@dataclass
class Samples(Dataset):
    """A data set whose items are the pixels of selections, made in worker processes.

    Pixels are (n, [views,] side, side, channels) uint8. Those of deep images are float32 from 0 to
    255.

    Args:
        pipeline: the operations on each image; None: the device crops resize × resize pixels.
    """

    open_sample: OpenSample
    framing: Framing
    pipeline: Operation | None = None
    num_workers: int = 0

    def __getitem__(self, selection: Selection) -> tuple[Selection, list[Any]] | UserError:
        try:
            arrays = self._read(selection)
        except UserError as error:
            # If it was raised here, its message would contain the worker's traceback.
            return error

        # A worker without free shared memory (containers have 64 MB by default) would fail without
        # any message. Arrays go through a pipe, which is slower.
        num_bytes = (self.num_workers + 1) * sum(array.nbytes for array in arrays)
        if free_shared_memory() > num_bytes:
            return selection, [torch.from_numpy(array) for array in arrays]
        return selection, arrays

    def _read(self, selection: Selection) -> list[np.ndarray]:
        """Return the pixels of the images, and then the pixels of each mask."""
        positions = selection.positions.tolist()
        seeds = selection.draws.T.tolist()
        if not positions:
            # An empty batch has the shapes of the first image.
            return [np.stack([part])[:0] for part in self._read_sample(0, [0])]
        pairs = zip(positions, seeds, strict=True)
        samples = [self._read_sample(position, image_seeds) for position, image_seeds in pairs]
        return [np.stack(part) for part in zip(*samples)]

    def _read_sample(self, position: int, seeds: Sequence[int]) -> list[np.ndarray]:
        """Return the pixels of one image and of its masks, in all views.

        Args:
            seeds: a seed for each view, which a pipeline needs.
        """
        sample = self.open_sample(position)
        if self.pipeline is None:
            return [to_array(self.framing.square(part)) for part in sample]
        views = [augment(self.pipeline, sample, seed) for seed in seeds]
        if len(views) == 1:
            return views[0]
        return [np.stack(part) for part in zip(*views)]


def augment(pipeline: Operation, sample: tuple[Any, ...], seed: int) -> list[np.ndarray]:
    """Return the pixels of an image and of its masks after all operations of a pipeline."""
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the GPU's generator as well.
        torch.default_generator.manual_seed(seed)
        if len(sample) == 1:
            # Some operations take no tuple, so an image without masks is passed alone.
            return [to_array(pipeline(sample[0]))]
        return [to_array(part) for part in pipeline(sample)]


def choose_num_workers(requested: int | str, device: torch.device) -> int:
    """Return the number of worker processes that load the images of this rank.

    Args:
        requested: a number, or auto. A network disk may need more workers than there are cores.
            With auto a GPU has a worker for each core of its rank but two, at most 16, and a CPU
            has at most 4 workers.
    """
    if requested != "auto":
        return int(requested)
    if device.type == "cuda":
        return max(1, min(16, cores_of_rank() - 2))
    return max(1, min(4, cores_of_task()))


def start_method(num_workers: int) -> str | None:
    """Return how workers are started: by fork on Linux; None: as Python does by default.

    The default of Python 3.14 on Linux is a fork server. With it each worker would import torch in
    every epoch, get the whole list of files through a pipe, and have no signals blocked.
    """
    if num_workers and sys.platform == "linux":
        return "fork"
    return None


def free_shared_memory() -> int:
    """Return the bytes of shared memory that are free for tensors of worker processes."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def load_pixels(
    samples: Samples, selections: Iterable[Selection], *, pin_memory: bool = False
) -> Iterator[tuple[Selection, list[Tensor]]]:
    """Yield each selection with the pixels of its images and of each mask, in order.

    Workers prepare some batches ahead.

    Raises:
        UserError: an image cannot be read or decoded. The error names it.
    """
    selections = iter(selections)
    first = next(selections, None)
    if first is None:
        return
    # This seed of the workers differs by seed, epoch and rank. Without it the loader would draw a
    # seed from torch's generator, whose state a resume restores.
    seed = zlib.crc32(first.positions.tobytes() + first.draws.tobytes())
    batches = _start_workers(samples, itertools.chain([first], selections), pin_memory, seed)
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            selection, pixels = batch
            yield selection, [torch.as_tensor(part) for part in pixels]
    finally:
        # This ends the workers now. Otherwise the traceback of an error would keep them alive, and
        # the program would wait for them at its end.
        del batches


def _start_workers(
    samples: Samples, selections: Iterable[Selection], pin_memory: bool, seed: int
) -> Iterator[Any]:
    children = multiprocessing.active_children()
    # Workers start with these signals blocked. A signal to all processes of a job is meant for the
    # rank, which saves a checkpoint first.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        return _start_loader(samples, selections, pin_memory, seed)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _workers.update(set(multiprocessing.active_children()).difference(children))


def _start_loader(
    samples: Samples, selections: Iterable[Selection], pin_memory: bool, seed: int
) -> Iterator[Any]:
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork beside other threads. A DataLoader always has idle ones.
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        # A network disk needs more workers than there are cores.
        warnings.filterwarnings("ignore", "This DataLoader will create")
        loader = DataLoader(
            samples,
            batch_size=None,
            sampler=selections,
            collate_fn=_identity,
            num_workers=samples.num_workers,
            pin_memory=pin_memory,
            multiprocessing_context=start_method(samples.num_workers),
            generator=torch.Generator().manual_seed(seed),
        )
        return iter(loader)


@atexit.register
def _kill_workers() -> None:
    """Kill the workers before the exit handler of multiprocessing would wait for them in vain.

    That handler sends SIGTERM, which the workers block.
    """
    workers = [process for process in multiprocessing.active_children() if process in _workers]
    if workers:
        # torch's handler would report them as failed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in workers:
        worker.kill()


def _identity(batch: Any) -> Any:
    """Return the batch as it is.

    This is no lambda, because a worker that is not forked imports the function by its name.
    """
    return batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream that copies batches in all epochs.

    All epochs share it: torch has 32 streams, and keeps the memory of each one for that stream.
    """
    return torch.cuda.Stream(device)


def prefetch(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield each batch on a GPU. Meanwhile a thread makes the next batch and copies it there.

    Args:
        batches: collections of tensors in CPU memory. Large tensors are pinned.
    """
    copy_stream = _copy_stream(device)

    def copy_next() -> Any:
        # The context also sets the device, to which pinned memory belongs.
        with torch.cuda.stream(copy_stream):
            batch = next(batches, None)
            return None if batch is None else move_data_to_device(batch, device)

    with ThreadPoolExecutor(1, "next batch") as thread:
        next_batch = thread.submit(copy_next)
        while (batch := next_batch.result()) is not None:
            step_stream = torch.cuda.current_stream(device)
            step_stream.wait_stream(copy_stream)
            next_batch = thread.submit(copy_next)
            # Later copies do not reuse the memory of this batch before its step has ended.
            apply_to_collection(batch, Tensor, Tensor.record_stream, step_stream)
            yield batch
