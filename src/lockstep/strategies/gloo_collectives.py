"""FSDP's two collectives over gloo, by messages between pairs of ranks.

Gloo reduces and scatters by reducing everything to everyone and throwing most of it away, and gathers in a ring. In
CPU processes on one machine each rank's part sent straight to the rank that wants it takes about half that time. The
next unit's weights are on their way while a unit computes, as on a GPU, so that ranks seldom wait for one another.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter


class GlooReduceScatter(DefaultReduceScatter):
    """Each rank gets its part from all others and adds them up, in the order of the ranks."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), 0, out=output_tensor.view(-1))
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None


class Messages(dist.Work):
    """Sends and receives under way, as FSDP waits for them; holds their tensors until then."""

    def __init__(self, works: list[Any], *tensors: torch.Tensor) -> None:
        super().__init__()
        self.works, self.tensors = works, tensors

    def wait(self, timeout: Any = None) -> bool:
        for work in self.works:
            work.wait()
        return True


class GlooAllGather(DefaultAllGather):
    """Each rank sends its part to all others."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        mine, parts = group.rank(), output_tensor.view(group.size(), -1)
        others = [rank for rank in range(group.size()) if rank != mine]
        own = parts[mine]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        works = [group.recv([parts[rank]], rank, 0) for rank in others]
        works += [group.send([own], rank, 0) for rank in others]
        messages = Messages(works, output_tensor)
        if async_op:
            return messages
        messages.wait()
        return None


def use_gloo_collectives(net: FSDPModule, units: list[FSDPModule]) -> None:
    """In this module and in all sharded modules within it.

    Args:
        units: the sharded modules that forward goes through one after the other.
    """
    for module in net.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(GlooReduceScatter())
            module.set_custom_all_gather(GlooAllGather())
    net._set_unshard_async_op(True)
    for before, after in pairwise([net, *units]):
        before.set_modules_to_forward_prefetch([after])
