"""Load images in DataLoader worker processes: read, decode, and resize or augment each one as a batch needs it."""

import atexit
import multiprocessing
import shutil
import signal
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.augmentation import Operation, own_stream
from lockstep.data.batches import Selection
from lockstep.data.decoding import CorruptImage, pixels_of
from lockstep.data.framing import Framing
from lockstep.runs.errors import UserError

OpenImage = Callable[[int], Image.Image]
"""position → the whole image, RGB or L"""
MakeImage = Callable[[int, int], np.ndarray]
"""(position, draw) → (side, side, channels) uint8; the draw seeds the image's own random stream"""

_workers: set[multiprocessing.process.BaseProcess] = set()


def square(open_image: OpenImage, framing: Framing, position: int, _draw: int) -> np.ndarray:
    """Return an image as an array holds it: resize × resize."""
    return pixels_of(framing.square(open_image(position)))


def augmented(open_image: OpenImage, pipeline: Operation, position: int, draw: int) -> np.ndarray:
    """Return an image as training sees it."""
    with own_stream(draw):
        return pixels_of(pipeline(open_image(position)))


class _Batches(Dataset):
    """Whole batches (n, side, side, channels) uint8, or the error of one of their images."""

    def __init__(self, make: MakeImage, num_workers: int) -> None:
        self._make, self._num_workers = make, num_workers

    def __getitems__(self, wanted: list[tuple[int, int]]) -> Tensor | np.ndarray | Exception:
        try:
            images = np.stack([self._make(*each) for each in wanted])
        except (CorruptImage, UserError) as error:  # raised here it would carry the worker's traceback
            return error
        # A worker that finds no shared memory (64 MB in a container by default) fails without a word to the loader:
        # arrays go through a pipe, more slowly.
        return torch.from_numpy(images) if free_shared_memory() > (self._num_workers + 1) * images.nbytes else images


def free_shared_memory() -> int:
    """Return the bytes in which worker processes can hand over tensors."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def stream(
    selections: Iterable[Selection], make: MakeImage, *, num_workers: int, pin_memory: bool = False
) -> Iterator[tuple[Selection, Tensor]]:
    """Yield each selection with its images, in order; workers prepare some batches ahead.

    Raises:
        UserError: names an image that cannot be read or decoded.
    """
    waiting: deque[Selection] = deque()

    def wanted() -> Iterator[list[tuple[int, int]]]:
        for selection in selections:
            waiting.append(selection)
            yield list(zip(selection.positions.tolist(), selection.draws[0].tolist(), strict=True))

    loader = DataLoader(
        _Batches(make, num_workers),
        batch_sampler=wanted(),
        collate_fn=_unchanged,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # the loader draws a seed: not from the global stream, which a resume restores
    )
    before = set(multiprocessing.active_children())
    with warnings.catch_warnings():  # forking beside idle threads is what every DataLoader does; Python 3.12 warns
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        batches = iter(loader)
    started = set(multiprocessing.active_children()) - before
    _workers.update(started)
    try:
        for images in batches:
            if isinstance(images, CorruptImage):
                raise UserError(f"{images}: repair or remove it, or leave out such images with data.skip_corrupt=true.")
            if isinstance(images, Exception):
                raise images
            yield waiting.popleft(), torch.as_tensor(images)
    finally:
        del batches  # ends the workers now: an error's traceback would keep them, and the program's end wait for them
        _workers.difference_update({worker for worker in started if not worker.is_alive()})


def _ignore_signals(_worker: int) -> None:
    """A signal to all processes of a job is for the rank, which saves first and then ends its workers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Runs before multiprocessing's own exit handler, which would wait for workers that ignore SIGTERM."""
    if _workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report them as failed
    for worker in _workers:
        worker.kill()


def _unchanged(batch: Any) -> Any:
    return batch
