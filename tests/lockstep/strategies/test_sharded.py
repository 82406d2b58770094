"""Sharded trains as one process does, keeps only its shards, and scales losses in float16."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from local_ranks import run_ranks
from lockstep.runs.errors import UserError
from lockstep.strategies.precision import precision_for
from lockstep.strategies.sharded import check_shardable
from strategy_runs import adamw, difference, fit, mean_losses, one, ranks, ranks_all, sgd, worst

WITHIN = {"own": {"shard_within_node": True}}
BASIC = [{}, {"accumulate": 2}, {"clip": 0.5}, {"optimizer": adamw}, {"batch_norm": True, "sync_batchnorm": True}]
FURTHER = [
    {"optimizer": partial(adamw, fused=True), "clip": 0.5},
    {"optimizer": partial(adamw, foreach=True)},
    {"optimizer": partial(sgd, foreach=True)},
    {"recompute": True},
    {"own": {"reshard_after_forward": False}},
]


@pytest.mark.parametrize(
    ("world_size", "nodes", "every"),
    [
        (2, 1, BASIC),
        pytest.param(2, 1, FURTHER, marks=pytest.mark.slow),
        pytest.param(4, 1, [{}, {"accumulate": 2}], marks=pytest.mark.slow),
        pytest.param(4, 2, [WITHIN, {**WITHIN, "accumulate": 2, "clip": 0.5}], marks=pytest.mark.slow),
    ],
)
def test_equals_one_process_in_float64(world_size, nodes, every):
    for settings, found in zip(every, ranks_all(world_size, [("fsdp", s) for s in every], nodes), strict=True):
        same = {key: settings[key] for key in ("clip", "optimizer", "batch_norm") if key in settings}
        assert difference(found, one(**same), settings.get("accumulate", 1)) < 1e-12, settings


def describe_shards(trainer):
    parameters = list(trainer.lightning_module.net.parameters())
    optimizer = trainer.optimizers[0]
    momentum = [optimizer.state[p]["momentum_buffer"] for p in parameters]
    mesh = trainer.strategy.device_mesh
    return {
        "own": sum(p.to_local().numel() for p in parameters),
        "whole": sum(p.numel() for p in parameters),
        "momentum": sum(m.to_local().numel() for m in momentum),
        "mesh": {name: mesh[name].size() for name in mesh.mesh_dim_names},
    }


def test_each_rank_keeps_its_part_of_weights_and_optimizer_state():
    parts = [r["inspect"] for r in ranks("fsdp", 2, steps=1, inspect=describe_shards)]
    assert sum(part["own"] for part in parts) == parts[0]["whole"]
    assert max(part["own"] for part in parts) < 0.55 * parts[0]["whole"]
    assert [part["momentum"] for part in parts] == [part["own"] for part in parts]
    assert parts[0]["mesh"] == {"shard": 2}


def test_shard_within_node_replicates_over_nodes():
    parts = [
        r["inspect"] for r in ranks("fsdp", 4, 2, steps=1, inspect=describe_shards, own={"shard_within_node": True})
    ]
    assert parts[0]["mesh"] == {"replicate": 2, "shard": 2}
    assert [part["own"] for part in parts[:2]] == [part["own"] for part in parts[2:]]
    assert parts[0]["own"] + parts[1]["own"] == parts[0]["whole"]


def count_reductions(cluster, accumulate):
    counted = []

    def counting(original):
        return lambda *args, **kwargs: (counted.append(1), original(*args, **kwargs))[1]

    dist.reduce_scatter_single = counting(dist.reduce_scatter_single)
    fit(cluster, "fsdp", steps=3, accumulate=accumulate)
    return len(counted)


def test_no_gradient_is_reduced_on_inner_micro_batches():
    plain, accumulated = (run_ranks(count_reductions, 2, accumulate)[0] for accumulate in (1, 4))
    assert plain == accumulated == 3 * 4  # steps × (three blocks and the root)


def scale(trainer):
    return trainer.precision_plugin.scaler.get_scale()


def test_low_precision_stays_close_and_keeps_float32_weights():
    cases = [(precision, norm) for precision in ("bf16-mixed", "16-mixed") for norm in (False, True)]
    runs = [("fsdp", {"precision": p, "batch_norm": norm, "sync_batchnorm": norm}) for p, norm in cases]
    for (_, norm), found in zip(cases, ranks_all(2, runs), strict=True):
        expected = one(precision="32-true", batch_norm=norm)
        np.testing.assert_allclose(mean_losses(found), expected["losses"], rtol=5e-3)
        assert {str(w.dtype) for w in found[0]["weights"].values()} <= {"float32", "int64"}


@pytest.mark.parametrize(
    ("world_size", "nodes", "own"),
    [(2, 1, {}), pytest.param(4, 2, {"shard_within_node": True}, marks=pytest.mark.slow)],
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size, nodes, own):
    same = {"precision": "16-mixed", "inspect": scale, "own": own}
    runs = [("fsdp", {**same, "steps": 6, "overflow_at": 5}), ("fsdp", {**same, "steps": 5})]
    skipped, without = ranks_all(world_size, runs, nodes)
    assert worst(skipped[0]["weights"], without[0]["weights"]) == 0
    assert [r["inspect"] for r in skipped] == [32768.0] * world_size
    assert [r["inspect"] for r in without] == [65536.0] * world_size


def test_batchnorm_of_rank_zero_is_evaluated_everywhere():
    settings = {"batch_norm": True, "steps": 2, "inspect": running_mean}
    for found in ranks_all(2, [(name, settings) for name in ("fsdp", "ddp", "allreduce")]):
        np.testing.assert_array_equal(found[0]["inspect"], found[1]["inspect"])


def running_mean(trainer):
    return trainer.lightning_module.net.embed[2].running_mean.numpy().copy()


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))


def test_what_cannot_be_sharded_is_said_before_it_begins():
    with pytest.raises(UserError, match="temperature is a scalar.*trainer=ddp"):
        check_shardable(Scalar())
    with pytest.raises(UserError, match="precision=8-bit is unknown.*bf16-mixed"):
        precision_for("8-bit", "cpu")
