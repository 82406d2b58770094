"""The train and evaluation loaders: the images, their order and their augmentation on each rank.

Everything follows from (seed, epoch, step), so that one process and N ranks see the same pixels.
Order and augmentation are drawn for a whole epoch at once, because a random generator for each step
would cost more time than a batch of crops.

Global batch s takes images [s·G, (s+1)·G) of the epoch. `rank_slices` says how ranks and
micro-batches share them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import SequentialSampler

from lockstep.data.sampling import Sampling
from lockstep.process.errors import UserError
from lockstep.records.batch import Batch

# These numbers keep the random streams of one seed apart.
SPLIT_STREAM = 0
ORDER_STREAM = 1
AUGMENTATION_STREAM = 2
TEST_STREAM = 3
MIXING_STREAM = 4


class Selection(NamedTuple):
    """The images that one rank loads next.

    Attributes:
        positions: (n,) int64.
        draws: (3 · views, n) int64, the rows dy, dx and flip of each view. If workers augment
            single images it is (views, n), a seed for each view of an image.
        mixing: (6, n/2) float64, see Mixing.draw; None: nothing is mixed.
    """

    positions: np.ndarray
    draws: np.ndarray
    mixing: np.ndarray | None = None


MakeBatches = Callable[[Iterable[Selection]], Iterator[Any]]
"""A function that makes the batches of selections, in order. It may read ahead."""
DrawEpoch = Callable[[int, int, int], tuple[np.ndarray, np.ndarray | None]]
"""A function of (seed, epoch, n), which returns draws and mixing of a Selection of n images."""


def random_stream(seed: int, *purpose: int) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose])


def rank_slices(
    global_batch_size: int, rank: int, world_size: int, accumulate_grad_batches: int
) -> list[slice]:
    """Return the part of a global batch that a rank takes in each micro-batch.

    Micro-batch j of k has the positions [j·G/k, (j+1)·G/k) of a global batch of G images. It is cut
    into W equal contiguous parts for W ranks, and rank r takes part r.
    """
    size = Batch.cut(global_batch_size, world_size, accumulate_grad_batches).per_device
    slices = []
    for micro_batch in range(accumulate_grad_batches):
        first = (micro_batch * world_size + rank) * size
        slices.append(slice(first, first + size))
    return slices


class TrainBatches:
    """This rank's micro-batches of an epoch's complete global batches; the remainder is dropped.

    `len()` counts micro-batches. `state_dict()` counts global batches, so that accumulation and
    world size may differ between saving and loading. Lightning finds `set_epoch` through `sampler`.

    Attributes:
        order_on_any_ranks: tells a resume that the global batches do not depend on the ranks.

    Args:
        indices: positions of the training images.
        sampling: how the images of an epoch are drawn; None: each one once, in random order.
        repeats_first_epoch: repeat the order and augmentation of epoch 0 (overfit_batches).
    """

    order_on_any_ranks = True

    def __init__(
        self,
        make_batches: MakeBatches,
        indices: np.ndarray,
        draw: DrawEpoch,
        *,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        accumulate_grad_batches: int = 1,
        seed: int = 0,
        sampling: Sampling | None = None,
        repeats_first_epoch: bool = False,
    ) -> None:
        self.seed = seed
        epoch_size = sampling.epoch_size if sampling else len(indices)
        self.steps_per_epoch = epoch_size // global_batch_size
        self._make_batches = make_batches
        self._indices = indices
        self._draw = draw
        self._sampling = sampling
        self._global_batch_size = global_batch_size
        self._accumulate = accumulate_grad_batches
        self._slices = rank_slices(global_batch_size, rank, world_size, accumulate_grad_batches)

        self._epoch = 0
        # The next iteration starts at this step. It is 0, except after load_state_dict.
        self._first_step = 0
        self._micro_batches_done = 0
        # A sequential sampler tells Lightning that the order stays the same. It has no set_epoch.
        self.sampler = SequentialSampler(range(len(indices))) if repeats_first_epoch else self

    def __len__(self) -> int:
        return self.steps_per_epoch * self._accumulate

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            self._first_step = 0
            self._micro_batches_done = 0

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
        steps = state["steps_per_epoch"]
        is_same_cut = (
            steps == self.steps_per_epoch and state["global_batch_size"] == self._global_batch_size
        )
        if 0 < done < steps and not is_same_cut:
            raise UserError(
                f"The checkpoint is at step {done} of {steps} within an epoch at "
                f"data.global_batch_size={state['global_batch_size']}: resume with the same batch "
                f"and data (now {self.steps_per_epoch} steps at {self._global_batch_size})."
            )

        self._epoch = state["epoch"]
        self._first_step = self.steps_per_epoch if done >= steps else done
        self._micro_batches_done = self._first_step * self._accumulate

    def __iter__(self) -> Iterator[Any]:
        # Lightning calls iter() before load_state_dict and set_epoch. This works because no line
        # of a generator runs before the first next().
        first_step = self._first_step
        self._first_step = 0
        self._micro_batches_done = first_step * self._accumulate
        for batch in self._make_batches(self._selections(first_step)):
            self._micro_batches_done += 1
            yield batch

    def _selections(self, first_step: int) -> Iterator[Selection]:
        size = self._global_batch_size
        count = self.steps_per_epoch * size
        order = self._draw_order(count)
        draws, mixing = self._draw(self.seed, self._epoch, count)

        for start in range(first_step * size, count, size):
            for part in self._slices:
                first = start + part.start
                end = start + part.stop
                pairs = None
                if mixing is not None:
                    pairs = mixing[:, first // 2 : end // 2]
                yield Selection(order[first:end], draws[:, first:end], pairs)

    def _draw_order(self, count: int) -> np.ndarray:
        """Return the positions of at least `count` images of this epoch, in their order."""
        generator = random_stream(self.seed, ORDER_STREAM, self._epoch)
        if self._sampling is None:
            return generator.permutation(self._indices)
        return self._sampling.draw(generator, count)


class EvalBatches:
    """Every image once over all ranks, in order, with the same number of batches on every rank.

    There are as few batches as possible with at most `batch_size` images per device. Their sizes
    differ by at most one image. If there are fewer images than ranks, some ranks get an empty
    batch.

    Args:
        draws: (3,) int64, the same dy, dx and flip for every image: the centre crop.
    """

    def __init__(
        self,
        make_batches: MakeBatches,
        indices: np.ndarray,
        draws: np.ndarray,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        num_batches = math.ceil(len(indices) / (batch_size * world_size))
        parts = np.array_split(indices, max(num_batches * world_size, 1))
        rank_parts = parts[rank::world_size][:num_batches]
        self._make_batches = make_batches
        self._selections = [
            Selection(positions, draws[:, None].repeat(len(positions), 1))
            for positions in rank_parts
        ]

    def __len__(self) -> int:
        return len(self._selections)

    def shard(self, rank: int, world_size: int) -> "EvalBatches":
        """Return this rank's share of the batches: every world_size-th one, from `rank` on."""
        batches = copy(self)
        batches._selections = self._selections[rank::world_size]
        return batches

    def positions(self, batch_idx: int) -> torch.Tensor:
        """Return (n,) int64, the images of a batch of this rank."""
        return torch.from_numpy(self._selections[batch_idx].positions)

    def __iter__(self) -> Iterator[Any]:
        return self._make_batches(self._selections)
