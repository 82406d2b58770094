"""DDP trains as one process does, without a collective in evaluation's forwards."""

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from local_ranks import run_ranks
from strategy_runs import Batches, Classifier, TinyNet, difference, one, plain_sgd, ranks_all, trainer_of

SETTINGS = [{}, {"accumulate": 2}, {"clip": 0.5}, {"batch_norm": True, "sync_batchnorm": True}]


def test_equals_one_process_in_float64():
    for settings, found in zip(SETTINGS, ranks_all(2, [("ddp", s) for s in SETTINGS]), strict=True):
        same = {key: settings[key] for key in ("clip", "batch_norm") if key in settings}
        assert difference(found, one(**same), settings.get("accumulate", 1)) < 1e-12, settings


def count_broadcasts(cluster, batches):
    trainer = trainer_of(cluster, "ddp")
    module = Classifier(TinyNet(batch_norm=True), plain_sgd)
    trainer.fit(module, Batches(1, cluster.rank, cluster.world_size, 1))
    counted, original = [], dist.broadcast
    dist.broadcast = lambda *args, **kwargs: (counted.append(args[0].data_ptr()), original(*args, **kwargs))[1]
    trainer.validate(module, Batches(batches, cluster.rank, cluster.world_size, 1), verbose=False)
    return len([place for place in counted if place in {buffer.data_ptr() for buffer in module.buffers()}])


def test_buffers_travel_once_an_evaluation_not_once_a_batch():
    few, many = (run_ranks(count_broadcasts, 2, batches)[0] for batches in (1, 5))
    assert few == many == 3  # running mean, running variance, count of batches


def test_weights_of_rank_zero_are_everyones():
    assert run_ranks(largest_distance_from_rank_zeros, 2) == [0.0, 0.0]


def largest_distance_from_rank_zeros(cluster):
    """Each rank starts with other weights, and no step changes them."""
    distances = []
    for name in ("ddp", "allreduce", "fsdp"):
        torch.manual_seed(0)
        expected = TinyNet().double().state_dict()
        torch.manual_seed(cluster.rank)
        module = Classifier(TinyNet(), functools.partial(torch.optim.SGD, lr=0.0))
        trainer = trainer_of(cluster, name)
        trainer.fit(module, Batches(1, cluster.rank, cluster.world_size, 1))
        for key, found in module.net.state_dict().items():
            whole = found.full_tensor() if name == "fsdp" else found
            distances.append(float((whole - expected[key]).abs().max()))
    return max(distances)


SENT = ["words", None, True, 3, 0.5, Path("a/b"), ["a", 1], {"a": 1}]


def received(cluster, name):
    strategy = trainer_of(cluster, name).strategy
    strategy.setup_environment()
    return [strategy.broadcast(value if cluster.rank == 1 else "of another rank", 1) for value in SENT]


@pytest.mark.parametrize("name", ["ddp", "allreduce"])
def test_what_a_rank_broadcasts_arrives_as_it_was(name):
    assert run_ranks(received, 2, name) == [SENT] * 2
