"""FSDP's two collectives over gloo, by messages between pairs of ranks.

Gloo reduces and scatters by reducing everything to everyone and throwing most of it away, and gathers in a ring. In
CPU processes on one machine each rank's part sent straight to the rank that wants it takes about half that time.
"""

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


class GlooAllGather(DefaultAllGather):
    """Each rank sends its part to all others."""

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        if async_op:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        mine, parts = group.rank(), output_tensor.view(group.size(), -1)
        others = [rank for rank in range(group.size()) if rank != mine]
        own = parts[mine]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        works = [group.recv([parts[rank]], rank, 0) for rank in others]
        works += [group.send([own], rank, 0) for rank in others]
        for work in works:
            work.wait()
        return None


def use_gloo_collectives(net: FSDPModule) -> None:
    """In this module and in all sharded modules within it."""
    for module in net.modules():  # type: ignore[attr-defined]
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(GlooReduceScatter())
            module.set_custom_all_gather(GlooAllGather())
