"""The train and evaluation loaders: which images, in which order and with which augmentation, each rank gets.

Everything follows from (seed, epoch, step), so that one process and N ranks see the same pixels. Order and augmentation
are drawn for a whole epoch at once, as a generator for each step would cost more than a batch of crops. Global batch s
takes images [s·G, (s+1)·G) of the epoch; micro-batch j of k covers its positions [j·G/k, (j+1)·G/k), and rank r of W
takes the r-th of W equal contiguous parts of that.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import SequentialSampler

from lockstep.runs.batch import Batch
from lockstep.runs.errors import UserError

SPLIT, ORDER, AUGMENTATION, TEST, MIXING = 0, 1, 2, 3, 4  # keep the random streams of one seed apart


class Selection(NamedTuple):
    """The images that one rank loads next.

    Args:
        positions: (n,) int64, of the images.
        draws: (3, n) int64, the rows dy, dx and flip, or (1, n), a seed for each image; as many times as there are
            views of an image.
        mixing: (6, n/2) float64 as of Mixing.draw; None: nothing is mixed.
    """

    positions: np.ndarray
    draws: np.ndarray
    mixing: np.ndarray | None = None


Deliver = Callable[[Iterable[Selection]], Iterator[Any]]
"""Turns selections into batches, in order; it may read ahead."""


def random_stream(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose])


class TrainBatches:
    """This rank's micro-batches of an epoch's complete global batches; the remainder is dropped.

    `len()` counts micro-batches, and `state_dict()` global batches, so that accumulation and world size may differ
    between saving and loading. Lightning finds `set_epoch` through `sampler`.

    Args:
        indices: positions of the training images.
        draw: draw(generator, n) → (3, n) or (1, n) int64, the augmentation of an epoch.
        draw_mixing: draw_mixing(generator, epoch, pairs) → (6, pairs) float64, or None.
        fixed: repeat the order and augmentation of epoch 0 (Lightning's overfit_batches).
    """

    def __init__(
        self, deliver: Deliver, indices: np.ndarray, draw: Callable[[np.random.Generator, int], np.ndarray], *,
        draw_mixing: Callable[[np.random.Generator, int, int], np.ndarray | None] | None = None, global_batch_size:
        int, rank: int = 0, world_size: int = 1, accumulate_grad_batches: int = 1, seed: int = 0, fixed: bool = False,
    ) -> None:  # fmt: skip
        self.per_device_batch_size = Batch.cut(global_batch_size, world_size, accumulate_grad_batches).per_device
        self.steps_per_epoch = len(indices) // global_batch_size
        self._deliver, self._indices, self._draw, self._draw_mixing = deliver, indices, draw, draw_mixing
        self._global_batch_size, self._accumulate, self.seed = global_batch_size, accumulate_grad_batches, seed
        # Where this rank's part of micro-batch j lies within a global batch.
        first = np.arange(accumulate_grad_batches) * world_size + rank
        self._parts = [(f * self.per_device_batch_size, (f + 1) * self.per_device_batch_size) for f in first.tolist()]
        self._epoch = 0
        self._first_step = 0  # where the next iteration starts: 0 but after load_state_dict
        self._micro_batches_done = 0
        # A sequential sampler tells Lightning that nothing is shuffled between epochs, and has no set_epoch.
        self.sampler = SequentialSampler(range(len(indices))) if fixed else self

    def __len__(self) -> int:
        return self.steps_per_epoch * self._accumulate

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._first_step, self._micro_batches_done = epoch, 0, 0

    def state_dict(self) -> dict[str, int]:
        return {
            "epoch": self._epoch,
            "global_batches": self._micro_batches_done // self._accumulate,
            "steps_per_epoch": self.steps_per_epoch,
            "global_batch_size": self._global_batch_size,
            "accumulate_grad_batches": self._accumulate,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        done = state["global_batches"]
        finished = done >= state["steps_per_epoch"]
        before, now = (
            (state["steps_per_epoch"], state["global_batch_size"]),
            (self.steps_per_epoch, self._global_batch_size),
        )
        if before != now and 0 < done < before[0]:
            raise UserError(
                f"The checkpoint is at step {done} of {before[0]} within an epoch at data.global_batch_size={before[1]}"
                f": resume with the same batch and data (now {now[0]} steps at {now[1]})."
            )
        self._epoch = state["epoch"]
        self._first_step = self.steps_per_epoch if finished else done
        self._micro_batches_done = self._first_step * self._accumulate

    def __iter__(self) -> Iterator[Any]:
        # A generator: nothing runs before the first next(), so Lightning may call iter() first and load_state_dict
        # and set_epoch afterwards, as it does.
        first_step, self._first_step = self._first_step, 0
        self._micro_batches_done = first_step * self._accumulate
        for batch in self._deliver(self._selections(first_step)):
            self._micro_batches_done += 1
            yield batch

    def _selections(self, first_step: int) -> Iterator[Selection]:
        epoch, size, count = self._epoch, self._global_batch_size, self.steps_per_epoch * self._global_batch_size
        order = random_stream(self.seed, ORDER, epoch).permutation(self._indices)
        draws = self._draw(random_stream(self.seed, AUGMENTATION, epoch), count)
        mixing = None
        if self._draw_mixing:
            mixing = self._draw_mixing(random_stream(self.seed, MIXING, epoch), epoch, count // 2)
        for start in range(first_step * size, count, size):
            for first, end in self._parts:
                part = slice(start + first, start + end)
                pairs = None if mixing is None else mixing[:, part.start // 2 : part.stop // 2]
                yield Selection(order[part], draws[:, part], mixing=pairs)


class EvalBatches:
    """Every image once over all ranks, in order, with the same number of batches on every rank.

    There are as few batches as `batch_size` (per device, at most) allows, and their sizes differ by one image at most.
    With fewer images than ranks, some ranks get an empty batch.

    Args:
        draws: (3,) int64 dy, dx, flip for every image: the centre crop.
    """

    def __init__(
        self, deliver: Deliver, indices: np.ndarray, draws: np.ndarray, *, batch_size: int, rank: int = 0, world_size:
        int = 1,
    ) -> None:  # fmt: skip
        if batch_size < 1:
            raise UserError(f"data.eval_batch_size={batch_size} must be at least 1.")
        self._num_batches = -(-len(indices) // (batch_size * world_size))
        self._deliver, self._indices, self._draws = deliver, indices, draws
        self._rank, self._world_size = rank, world_size

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._deliver(self._selections()))

    def _selections(self) -> Iterator[Selection]:
        parts = np.array_split(self._indices, max(self._num_batches * self._world_size, 1))
        for batch in range(self._num_batches):
            part = parts[batch * self._world_size + self._rank]
            yield Selection(part, np.repeat(self._draws[:, None], len(part), axis=1))
