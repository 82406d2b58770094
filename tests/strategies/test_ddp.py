"""DDP trains as one process does, without a collective in evaluation's forwards."""

import torch.distributed as dist

from local_ranks import run_ranks
from strategy_runs import difference, one, ranks_all

SETTINGS = [{}, {"accumulate": 2}, {"clip": 0.5}, {"batch_norm": True, "sync_batchnorm": True}]


def test_equals_one_process_in_float64():
    for settings, found in zip(SETTINGS, ranks_all(2, [("ddp", s) for s in SETTINGS]), strict=True):
        same = {key: settings[key] for key in ("clip", "batch_norm") if key in settings}
        assert difference(found, one(**same), settings.get("accumulate", 1)) < 1e-12, settings


def count_broadcasts(cluster, batches):
    from strategy_runs import Batches, Classifier, TinyNet, plain_sgd, trainer_of

    trainer = trainer_of(cluster, "ddp")
    module = Classifier(TinyNet(batch_norm=True), plain_sgd)
    trainer.fit(module, Batches(1, cluster.rank, cluster.world_size, 1))
    counted, original = [], dist.broadcast
    dist.broadcast = lambda *args, **kwargs: (counted.append(1), original(*args, **kwargs))[1]
    trainer.validate(module, Batches(batches, cluster.rank, cluster.world_size, 1), verbose=False)
    return len(counted)


def test_buffers_travel_once_an_evaluation_not_once_a_batch():
    few, many = (run_ranks(count_broadcasts, 2, batches)[0] for batches in (1, 5))
    assert few == many == 3  # running mean, running variance, count of batches


def test_weights_of_rank_zero_are_everyones():
    assert run_ranks(different_seeds, 2) == [0.0, 0.0]


def different_seeds(cluster):
    import torch

    from strategy_runs import Batches, Classifier, TinyNet, plain_sgd, trainer_of

    drift = []
    for name in ("ddp", "allreduce", "fsdp"):
        torch.manual_seed(cluster.rank)
        module = Classifier(TinyNet(), plain_sgd)
        trainer = trainer_of(cluster, name)
        trainer.fit(module, Batches(1, cluster.rank, cluster.world_size, 1))
        weight = module.net.head.weight
        whole = (weight.full_tensor() if name == "fsdp" else weight).detach()
        pair = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(pair, whole.contiguous())
        drift.append(float((pair[0] - pair[1]).abs().max()))
    return max(drift)
