"""Each hook is found on those that offer it, by the names of its methods alone."""

import pytest

from lockstep.runs import hooks


def made(dotted):
    """An object of a class, nothing of which has run."""
    import importlib

    module, _, name = dotted.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found.__new__(found)


@pytest.mark.parametrize(
    ("hook", "offers", "lacks"),
    [
        ("HasShardUnits", "models.alexnet.AlexNet", "classifier.ImageClassifier"),
        ("HasStages", "models.alexnet.AlexNet", "classifier.ImageClassifier"),
        ("AdaptsWeights", "models.timm_vit.TimmViT", "models.alexnet.AlexNet"),
        ("StartsFromImages", "models.airbench.Airbench", "models.alexnet.AlexNet"),
        ("TakesNamedParameters", "optimizers.muon.Muon", "torch.optim.SGD"),
        ("OnCheckpointComplete", "lockstep.callbacks.run_recorder.RunRecorder", "lockstep.callbacks.progress.Progress"),
        ("OnCheckpointComplete", "lockstep.callbacks.s3_upload.S3Upload", "lockstep.callbacks.progress.Progress"),
        ("OnShardsComplete", "lockstep.callbacks.s3_upload.S3Upload", "lockstep.callbacks.run_recorder.RunRecorder"),
        ("ExpectsEnd", "lockstep.callbacks.s3_upload.S3Upload", "lockstep.callbacks.run_recorder.RunRecorder"),
        ("HasRecordFields", "lockstep.strategies.hivemind.Hivemind", "lockstep.strategies.ddp.DDP"),
        ("HasRecordFields", "lockstep.callbacks.throughput.Throughput", "lockstep.callbacks.progress.Progress"),
    ],
)
def test_a_hook_is_found_where_it_is_offered(hook, offers, lacks):
    assert isinstance(made(offers), getattr(hooks, hook)) and not isinstance(made(lacks), getattr(hooks, hook))


def test_strategies_of_several_devices_say_so():
    from lockstep.strategies.ddp import DDP
    from lockstep.strategies.model_parallel import ModelParallel

    two = ModelParallel(stage_devices=["cpu", "cpu"])
    assert isinstance(two, hooks.ComputesOnSeveral) and [device.type for device in two.process_devices] == ["cpu", "cpu"]
    assert not isinstance(DDP(), hooks.ComputesOnSeveral)


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
    from lockstep.strategies.capabilities import capabilities

    able = capabilities(made(name if name.startswith("lightning") else f"lockstep.strategies.{name}"))
    assert (able.supports_ema, able.supports_compile, able.scales_losses) == (ema, compile, scales)
    assert type(able.precision_for("bf16-mixed", "cpu")).__name__ == bf16
