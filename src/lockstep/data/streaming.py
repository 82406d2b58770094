"""Images that are too many for one array, decoded by DataLoader workers as they are needed."""

import signal
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lockstep.data.batches import Selection
from lockstep.data.image_tree import CorruptImage, decode
from lockstep.runs.errors import UserError


class _Files(Dataset):
    """A whole batch at a time: positions → (n, size, size, channels) uint8."""

    def __init__(self, files: Sequence[Path], size: int, channels: int) -> None:
        self._files, self._size, self._channels = files, size, channels

    def __getitems__(self, index: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.stack([decode(self._files[i], self._size, self._channels) for i in index]))


def stream(
    selections: Iterable[Selection],
    files: Sequence[Path],
    size: int,
    channels: int,
    *,
    num_workers: int,
    pin_memory: bool = False,
) -> Iterator[tuple[Selection, Tensor]]:
    """Each selection with its images, in the same order; workers read some batches ahead."""
    waiting: deque[Selection] = deque()

    def positions() -> Iterator[list[int]]:
        for selection in selections:
            waiting.append(selection)
            yield selection.positions.tolist()

    loader = DataLoader(
        _Files(files, size, channels),
        batch_sampler=positions(),
        collate_fn=_as_it_is,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=_outlive_signals,
        generator=torch.Generator(),  # the loader draws a seed: not from the global stream, which a resume restores
    )
    with warnings.catch_warnings():  # forking beside idle threads is what every DataLoader does; Python 3.12 warns
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)
        batches = iter(loader)
    try:
        for images in batches:
            yield waiting.popleft(), images
    except CorruptImage as error:
        raise UserError(f"{error}: it has changed since the images were checked; start again.") from None


def _outlive_signals(_worker: int) -> None:
    """A signal to the whole process group is for the run, which saves; torch ends its workers by itself."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _as_it_is(batch: Any) -> Any:
    return batch
