"""The same results as torch's own collectives, over every rank and over a part of the world."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from local_ranks import run_ranks
from lockstep.strategies.gloo_collectives import GlooAllGather, GlooReduceScatter


def compare(cluster, members):
    """Largest difference from torch's own of a gather, a sum and an average in `members` and the rest."""
    dist.init_process_group("gloo", rank=cluster.rank, world_size=cluster.world_size)
    rest = [rank for rank in range(cluster.world_size) if rank not in members]
    groups = [dist.new_group(ranks) for ranks in (members, rest) if ranks]
    group = groups[0 if cluster.rank in members else 1]
    whole = torch.randn(5 * group.size(), 3, generator=torch.Generator().manual_seed(cluster.rank))
    differences = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        found, expected = torch.empty(5, 3), torch.empty(5, 3)
        GlooReduceScatter()(found, whole.clone(), group, op)
        DefaultReduceScatter()(expected, whole.clone(), group, op)
        differences.append((found - expected).abs().max().item())
    # As FSDP calls it: the input is a part of the output.
    found, expected = torch.zeros(5 * group.size()), torch.zeros(5 * group.size())
    place = slice(5 * group.rank(), 5 * group.rank() + 5)
    found[place] = whole[:5, 0]
    GlooAllGather()(found, found[place], group)
    DefaultAllGather()(expected, whole[:5, 0].contiguous(), group)
    differences.append((found - expected).abs().max().item())
    # Two under way at once, waited for in the other order.
    later = [torch.zeros(5 * group.size()), torch.zeros(5 * group.size())]
    works = [GlooAllGather()(out, whole[:5, column].contiguous(), group, True) for column, out in enumerate(later)]
    for work in reversed(works):
        work.wait()
    for column, out in enumerate(later):
        DefaultAllGather()(expected, whole[:5, column].contiguous(), group)
        differences.append((out - expected).abs().max().item())
    dist.destroy_process_group()
    return differences


@pytest.mark.parametrize(("world_size", "members"), [(2, [0, 1]), (3, [0, 1, 2]), (4, [1, 3])])
def test_equal_torchs_own(world_size, members):
    for total, average, *gathered in run_ranks(compare, world_size, members):
        assert max(total, average) < 1e-6 and gathered == [0, 0, 0]
