"""Images that DataLoader workers make ready one by one, as they are needed: read, decoded, augmented."""

import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.batches import Selection
from lockstep.data.image_tree import CorruptImage
from lockstep.runs.errors import EXIT_FAILED, UserError

Wanted = tuple[int, int]
MakeImage = Callable[[int, int], np.ndarray]
"""(position, draw) → (side, side, channels) uint8; the draw is the first of the image's own."""
Ahead = Callable[[Sequence[int]], None]
"""Is told the positions of a batch before its images are made."""


class _Images(Dataset):
    """A whole batch at a time: (n, side, side, channels) uint8, or what is wrong with one of the images."""

    def __init__(self, make: MakeImage, ahead: Ahead) -> None:
        self._make, self._ahead = make, ahead

    def __getitems__(self, wanted: list[Wanted]) -> Tensor | Exception:
        try:
            self._ahead([position for position, _ in wanted])
            return torch.from_numpy(np.stack([self._make(*each) for each in wanted]))
        except (CorruptImage, UserError, ConnectionError) as error:  # raised here it would carry the worker's traceback
            return error


def stream(
    selections: Iterable[Selection], make: MakeImage, ahead: Ahead, *, num_workers: int, pin_memory: bool = False
) -> Iterator[tuple[Selection, Tensor]]:
    """Each selection with its images, in the same order; workers make some batches ahead.

    Raises:
        UserError: names an image that cannot be read or decoded.
        ConnectionError: of the bucket that they lie in.
    """
    waiting: deque[Selection] = deque()

    def wanted() -> Iterator[list[Wanted]]:
        for selection in selections:
            waiting.append(selection)
            yield list(zip(selection.positions.tolist(), selection.draws[0].tolist(), strict=True))

    loader = DataLoader(
        _Images(make, ahead),
        batch_sampler=wanted(),
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_live_as_the_rank,
        generator=torch.Generator(),  # the loader draws a seed: not from the global stream, which a resume restores
    )
    with warnings.catch_warnings():  # forking beside idle threads is what every DataLoader does; Python 3.12 warns
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        batches = iter(loader)
    try:
        for images in batches:
            if isinstance(images, CorruptImage):
                raise UserError(
                    f"{images}: mend it and start again, or start with data.skip_corrupt=true, which looks at all of "
                    "them first and leaves such out."
                )
            if isinstance(images, Exception):
                raise images
            yield waiting.popleft(), images
    finally:
        del batches  # ends the workers now: an error's traceback would keep them, and the program's end wait for them


def _live_as_the_rank(_worker: int) -> None:
    """A signal to the whole process group is for the run, which saves; the rank alone ends its workers.

    It does so by its end: where a fork server has started them, torch would look for the server. And by SIGTERM: an
    interrupted run still has loaders that nobody closed, and Python's exit waits for their workers.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    for wait in (_for_the_end_of, _for_a_signal_of):
        threading.Thread(target=_end_after, args=(wait, rank), daemon=True).start()


def _end_after(wait: Callable[[Any], None], rank: Any) -> None:
    wait(rank)
    os._exit(EXIT_FAILED)


def _for_the_end_of(rank: Any) -> None:
    rank.join()


def _for_a_signal_of(rank: Any) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
        pass


def _as_it_is(batch: Any) -> Any:
    return batch
