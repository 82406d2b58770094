"""Data parallelism by hand, to read before DDP (trainer=allreduce, trainer=allreduce_sim).

Every rank holds the whole model and sees its part of the global batch. Three things make N ranks one: equal weights
at the start; after backward every gradient summed over the ranks; and divided by their number.
DDP does the same in buckets while backward still runs: faster, and harder to see.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lockstep.strategies.base import Ranks, broadcast_from_rank_zero


class AllReduce(Ranks):
    last_micro_batch = True

    def model_to_device(self) -> None:
        self.model.to(self.root_device)
        broadcast_from_rank_zero([*self.model.parameters(), *self.model.buffers()], self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning runs all micro-batches of an accumulated step but the last in here: gradients only add up."""
        self.last_micro_batch = False
        yield
        self.last_micro_batch = True

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        if self.last_micro_batch:  # the mean over ranks of equal batches is the gradient of the global batch
            for parameter in (p for p in self.model.parameters() if p.grad is not None):
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
