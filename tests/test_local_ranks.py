"""Ranks of this machine for checks: results in order, and no silence when one fails, dies or hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from local_ranks import local_cluster, run_ranks


def add_up(cluster, number):
    dist.init_process_group("gloo", rank=cluster.rank, world_size=cluster.world_size)
    total = torch.tensor([float(number + cluster.rank)])
    dist.all_reduce(total)
    return cluster.rank, cluster.node_rank, cluster.local_rank, total, torch.get_num_threads()


def test_results_come_in_rank_order_from_one_world():
    results = run_ranks(add_up, 4, 10, num_nodes=2)
    assert [result[:3] for result in results] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert all(result[3].item() == 46 and result[4] == 1 for result in results)


def fail_on_one(cluster, how):
    if cluster.rank == 1:
        if how == "raise":
            raise ValueError("rank one is unhappy")
        if how == "die":
            os._exit(7)
        time.sleep(600)
    return cluster.rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("raise", "rank one is unhappy"), ("die", "rank 1 of 2 died"), ("hang", r"ranks \[1\] of 2 said")]
)
def test_a_rank_that_fails_dies_or_hangs_is_named(how, said):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=said):
        run_ranks(fail_on_one, 2, how, timeout_s=4 if how == "hang" else 60)
    assert time.monotonic() - started < 60


def test_local_cluster_counts_by_node():
    assert local_cluster(3, 4, 1, num_nodes=2).rank == 3
    assert local_cluster(0, 1, 1).world_size == 1
