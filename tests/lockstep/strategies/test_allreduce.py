"""The hand-written all-reduce trains as one process does, and stays short enough to read."""

import inspect

import torch.distributed as dist

from local_ranks import run_ranks
from lockstep.strategies import allreduce
from strategy_runs import difference, fit, one, ranks_all

SETTINGS = [{}, {"accumulate": 2}, {"clip": 0.5}, {"batch_norm": True, "sync_batchnorm": True}]


def test_equals_one_process_in_float64():
    for settings, found in zip(SETTINGS, ranks_all(2, [("allreduce", s) for s in SETTINGS]), strict=True):
        same = {key: settings[key] for key in ("clip", "batch_norm") if key in settings}
        assert difference(found, one(**same), settings.get("accumulate", 1)) < 1e-12, settings


def test_it_is_under_80_lines_and_uses_no_ddp():
    source = inspect.getsource(allreduce)
    assert source.count("\n") < 80
    assert "DistributedDataParallel" not in source and "DDPStrategy" not in source


def count_reductions(cluster, accumulate):
    counted, original = [], dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kw: (counted.append(tensor.dim()), original(tensor, *args, **kw))[1]
    fit(cluster, "allreduce", steps=3, accumulate=accumulate)
    return sum(1 for dim in counted if dim > 0)  # the validation loss is a scalar


def test_each_gradient_is_reduced_once_a_step():
    plain, accumulated = (run_ranks(count_reductions, 2, accumulate)[0] for accumulate in (1, 4))
    assert plain == accumulated == 3 * 17  # steps × parameters
