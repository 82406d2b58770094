"""What the run asks of every strategy, Lightning's own too."""

import importlib

import pytest

from lockstep.strategies.base import capabilities
from lockstep.strategies.ddp import DDP
from lockstep.strategies.model_parallel import ModelParallel


def made(dotted):
    """An object of a class, nothing of which has run."""
    module, _, name = dotted.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found.__new__(found)


def test_strategies_of_several_devices_name_them():
    two = ModelParallel(stage_devices=["cpu", "cpu"])
    assert [device.type for device in two.process_devices] == ["cpu", "cpu"] and not DDP().process_devices


@pytest.mark.parametrize(
    ("name", "ema", "compile", "scales", "bf16"),
    [
        ("ddp.DDP", True, True, True, "BFloat16Mixed"),
        ("allreduce.AllReduce", True, True, True, "BFloat16Mixed"),
        ("sharded.Sharded", False, True, True, "ShardedPrecision"),
        ("model_parallel.ModelParallel", False, False, True, "BFloat16Mixed"),
        ("data_parallel.DataParallel", True, False, True, "BFloat16Mixed"),
        ("hivemind.Hivemind", False, True, False, "BFloat16Mixed"),
        ("lightning.pytorch.strategies.SingleDeviceStrategy", True, True, True, "BFloat16Mixed"),
    ],
)
def test_every_strategy_answers_for_itself(name, ema, compile, scales, bf16):
    able = capabilities(made(name if name.startswith("lightning") else f"lockstep.strategies.{name}"))
    assert (not able.no_ema, able.supports_compile, able.scales_losses) == (ema, compile, scales)
    assert type(able.precision_for("bf16-mixed", "cpu")).__name__ == bf16
