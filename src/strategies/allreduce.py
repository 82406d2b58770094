"""Data parallelism by hand, to read before DDP (trainer=allreduce, trainer=allreduce_sim).

Every rank holds the whole model and sees its part of the global batch. Three things make N ranks
train as one: they start with equal weights; after backward every gradient is summed over the ranks;
and the sum is divided by their number. DDP does the same in buckets while backward still runs,
which is faster and harder to see.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from lockstep.strategies.base import ProcessPerDevice, broadcast_from_rank_zero


class AllReduce(ProcessPerDevice):
    is_last_micro_batch = True

    def model_to_device(self) -> None:
        self.model.to(self.root_device)
        tensors = [*self.model.parameters(), *self.model.buffers()]
        broadcast_from_rank_zero(tensors, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Add gradients up without exchanging them.

        Lightning enters this in all micro-batches of an accumulated step but the last.
        """
        self.is_last_micro_batch = False
        yield
        self.is_last_micro_batch = True

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        if not self.is_last_micro_batch:
            return
        parameters = list(self.model.parameters())
        # A rank that has not used a layer adds zeros to the gradients of the ranks that have.
        has_gradient = [parameter.grad is not None for parameter in parameters]
        rank_counts = torch.tensor(has_gradient, dtype=torch.int32, device=self.root_device)
        dist.all_reduce(rank_counts)

        # The ranks' batches are equal, so the mean over ranks is the global batch's gradient.
        for parameter, rank_count in zip(parameters, rank_counts.tolist(), strict=True):
            if not rank_count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
