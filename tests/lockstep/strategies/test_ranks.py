"""ddp, allreduce and fsdp train as one process does; each keeps, sends and reduces what it says."""

import functools
from functools import partial

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist

import strategy_runs as tiny
from local_ranks import run_ranks
from lockstep.process.errors import UserError
from lockstep.strategies.base import ProcessPerDevice
from lockstep.strategies.ddp import DDP

WITHIN = {"own": {"shard_within_node": True}}
BASIC = [
    (name, settings)
    for name in ("ddp", "allreduce", "fsdp")
    for settings in (
        {},
        {"accumulate": 2},
        {"clip": 0.5},
        {"batch_norm": True, "sync_batchnorm": True},
    )
]
FURTHER = [
    ("fsdp", {"optimizer": partial(tiny.adamw, fused=True), "clip": 0.5}),
    ("fsdp", {"optimizer": partial(tiny.adamw, foreach=True)}),
    ("fsdp", {"optimizer": partial(tiny.sgd, foreach=True)}),
    *((name, {"recompute": True, "accumulate": 2}) for name in ("ddp", "allreduce", "fsdp")),
    ("fsdp", {"own": {"reshard_after_forward": False}}),
]


@pytest.mark.parametrize(
    ("world_size", "nodes", "every"),
    [
        (2, 1, [*BASIC, ("fsdp", {"optimizer": tiny.adamw})]),
        pytest.param(2, 1, FURTHER, marks=pytest.mark.slow),
        pytest.param(
            4, 2, [("fsdp", {**WITHIN, "accumulate": 2, "clip": 0.5})], marks=pytest.mark.slow
        ),
    ],
)
def test_equals_one_process_in_float64(world_size, nodes, every):
    for (name, settings), found in zip(
        every, tiny.ranks_all(world_size, every, nodes), strict=True
    ):
        same = {
            key: settings[key] for key in ("clip", "optimizer", "batch_norm") if key in settings
        }
        assert tiny.difference(found, tiny.one(**same), settings.get("accumulate", 1)) < 1e-12, (
            name,
            settings,
        )


def test_low_precision_stays_close_and_skips_an_overflow():
    cases = [
        (precision, norm) for precision in ("bf16-mixed", "16-mixed") for norm in (False, True)
    ]
    runs = [
        ("fsdp", {"precision": p, "batch_norm": norm, "sync_batchnorm": norm}) for p, norm in cases
    ]
    scaled = {"precision": "16-mixed", "inspect": tiny.scale}
    overflow = [
        ("fsdp", {**scaled, "steps": 6, "overflow_at": 5}),
        ("fsdp", {**scaled, "steps": 5}),
    ]
    *close, skipped, without = tiny.ranks_all(2, [*runs, *overflow])
    for (_, norm), found in zip(cases, close, strict=True):
        expected = tiny.one(precision="32-true", batch_norm=norm)
        np.testing.assert_allclose(tiny.mean_losses(found), expected["losses"], rtol=5e-3)
        assert {str(w.dtype) for w in found[0]["weights"].values()} <= {"float32", "int64"}
    assert tiny.worst(skipped[0]["weights"], without[0]["weights"]) == 0
    assert [r["inspect"] for r in skipped] == [32768.0] * 2 and [r["inspect"] for r in without] == [
        65536.0
    ] * 2


def describe_shards(trainer):
    parameters = list(trainer.lightning_module.net.parameters())
    momentum = [trainer.optimizers[0].state[p]["momentum_buffer"] for p in parameters]
    own, held = (
        sum(each.to_local().numel() for each in tensors) for tensors in (parameters, momentum)
    )
    return own, held, sum(p.numel() for p in parameters), trainer.strategy.device_mesh.shape


def test_each_rank_keeps_its_part_of_weights_and_optimizer_state():
    parts = [r["inspect"] for r in tiny.ranks("fsdp", 2, steps=1, inspect=describe_shards)]
    assert (
        sum(own for own, *_ in parts) == parts[0][2]
        and max(own for own, *_ in parts) < 0.55 * parts[0][2]
    )
    assert all(own == momentum for own, momentum, *_ in parts)


@pytest.mark.slow
def test_shard_within_node_replicates_over_nodes():
    parts = [
        r["inspect"] for r in tiny.ranks("fsdp", 4, 2, steps=1, inspect=describe_shards, **WITHIN)
    ]
    assert parts[:2] == parts[2:] and parts[0][3] == (2, 2)
    assert parts[0][0] + parts[1][0] == parts[0][2]


def communication(cluster):
    """Count reductions of gradients, broadcasts of buffers, and distances from rank 0's weights, in
    one start.
    """
    reduced, broadcast = [], []

    def counting(original, counted):
        def call(*args, **kwargs):
            counted.append([*args, *kwargs.values()][0])
            return original(*args, **kwargs)

        return call

    dist.all_reduce = counting(dist.all_reduce, reduced)
    dist.reduce_scatter_single = counting(dist.reduce_scatter_single, reduced)
    dist.broadcast = counting(dist.broadcast, broadcast)
    result = {}
    for name in ("allreduce", "fsdp"):
        for accumulate in (1, 4):
            reduced.clear()
            tiny.fit(cluster, name, steps=3, accumulate=accumulate)
            result[name, accumulate] = sum(
                1 for tensor in reduced if tensor.dim() > 0
            )  # but the validation loss
    trainer, module = (
        tiny.trainer_of(cluster, DDP()),
        tiny.Classifier(tiny.TinyNet(batch_norm=True), tiny.plain_sgd),
    )
    trainer.fit(module, tiny.Batches(1, cluster.rank, cluster.world_size, 1))
    buffers = {buffer.data_ptr() for buffer in module.buffers()}
    for batches in (1, 5):
        broadcast.clear()
        trainer.validate(
            module, tiny.Batches(batches, cluster.rank, cluster.world_size, 1), verbose=False
        )
        result["buffers", batches] = sum(1 for tensor in broadcast if tensor.data_ptr() in buffers)
    for name in (
        "ddp",
        "allreduce",
        "fsdp",
    ):  # each rank begins with other weights, and no step changes them
        torch.manual_seed(0)
        expected = tiny.TinyNet().double().state_dict()
        torch.manual_seed(cluster.rank)
        module = tiny.Classifier(tiny.TinyNet(), functools.partial(torch.optim.SGD, lr=0.0))
        tiny.trainer_of(cluster, tiny.strategy_of(name)).fit(
            module, tiny.Batches(1, cluster.rank, cluster.world_size, 1)
        )
        for key, found in module.net.state_dict().items():
            whole = found.full_tensor() if name == "fsdp" else found
            assert torch.equal(whole, expected[key]), (name, key)
    return result


def test_ranks_exchange_each_gradient_and_buffer_once():
    for found in run_ranks(communication, 2):
        # steps × (parameters and which of them a rank has used)
        assert found["allreduce", 1] == found["allreduce", 4] == 3 * (17 + 1)
        assert found["fsdp", 1] == found["fsdp", 4] == 3 * 4  # steps × (three blocks and the root)
        assert (
            found["buffers", 1] == found["buffers", 5] == 3
        )  # running mean, running variance, count of batches


def calls_of_a_fit(cluster):
    """Return the methods of the strategies that Lightning calls."""
    called = []

    def replace(strategy_class, method):
        original = getattr(strategy_class, method)

        def call(strategy):
            called.append(f"{strategy_class.__name__}.{method}")
            return original(strategy)

        setattr(strategy_class, method, call)

    replace(DDP, "configure_ddp")
    replace(DDP, "determine_ddp_device_ids")
    replace(ProcessPerDevice, "configure_ddp")
    for name in ("ddp", "allreduce"):
        tiny.fit(cluster, name, steps=1)
    return called


def test_lightning_calls_what_the_strategies_replace():
    expected = [
        "DDP.configure_ddp",
        "DDP.determine_ddp_device_ids",
        "ProcessPerDevice.configure_ddp",
    ]
    assert run_ranks(calls_of_a_fit, 2) == [expected, expected]


def test_ddp_rounds_gradients_to_sixteen_bits_only_where_asked():
    kinds = [
        ("ddp", {"precision": "32-true", "own": {"gradient_dtype": kind}})
        for kind in ("bfloat16", "float16")
    ]
    expected = tiny.one(precision="32-true")
    bfloat16, float16 = (tiny.difference(found, expected) for found in tiny.ranks_all(2, kinds))
    assert 1e-5 < float16 < bfloat16 < 0.03
    with pytest.raises(UserError, match="gradient_dtype=half: give float32, bfloat16, float16"):
        tiny.strategy_of("ddp", gradient_dtype="half")


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_script_that_was_not_started_with_ranks_is_refused(name):
    own = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "max_epochs": 1,
    }
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=tiny.strategy_of(name), **own)
    with pytest.raises(UserError, match="needs ranks: start this script with torchrun"):
        trainer.fit(
            tiny.Classifier(tiny.TinyNet(), tiny.sgd),
            tiny.Batches(1, 0, 2, 1),
            tiny.Batches(1, 0, 2, 1),
        )


def running_mean(trainer):
    return trainer.lightning_module.net.embed[2].running_mean.numpy().copy()


def test_batchnorm_of_rank_zero_is_evaluated_everywhere():
    settings = {"batch_norm": True, "steps": 2, "inspect": running_mean}
    for found in tiny.ranks_all(2, [(name, settings) for name in ("fsdp", "ddp", "allreduce")]):
        np.testing.assert_array_equal(found[0]["inspect"], found[1]["inspect"])
