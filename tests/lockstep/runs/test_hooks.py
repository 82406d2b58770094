"""Each hook is found on those that offer it, by the names of its methods alone."""

import importlib

import pytest

from lockstep.runs import hooks


def made(dotted):
    """An object of a class, nothing of which has run."""
    module, _, name = dotted.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found.__new__(found)


@pytest.mark.parametrize(
    ("hook", "offers", "lacks"),
    [
        ("HasShardUnits", "models.alexnet.AlexNet", "classifier.ImageClassifier"),
        ("HasStages", "models.alexnet.AlexNet", "classifier.ImageClassifier"),
        ("StartsFromImages", "models.airbench.Airbench", "models.alexnet.AlexNet"),
        ("NamesHead", "models.timm.TimmModel", "models.alexnet.AlexNet"),
        ("NamesLayers", "models.timm.TimmModel", "models.alexnet.AlexNet"),
        ("NamesUndecayed", "models.timm.TimmModel", "models.alexnet.AlexNet"),
        ("GivesProbabilities", "losses.bce.BinaryCrossEntropy", "torch.nn.CrossEntropyLoss"),
        ("TakesNamedParameters", "optimizers.muon.Muon", "torch.optim.SGD"),
        ("OnCheckpointComplete", "lockstep.callbacks.run_recorder.RunRecorder", "lockstep.callbacks.progress.Progress"),
        ("OnCheckpointComplete", "lockstep.callbacks.s3_upload.S3Upload", "lockstep.callbacks.progress.Progress"),
        ("ExpectsEnd", "lockstep.callbacks.s3_upload.S3Upload", "lockstep.callbacks.run_recorder.RunRecorder"),
        ("HasRecordFields", "lockstep.strategies.hivemind.Hivemind", "lockstep.strategies.ddp.DDP"),
        ("HasRecordFields", "lockstep.callbacks.throughput.Throughput", "lockstep.callbacks.progress.Progress"),
    ],
)
def test_a_hook_is_found_where_it_is_offered(hook, offers, lacks):
    assert isinstance(made(offers), getattr(hooks, hook)) and not isinstance(made(lacks), getattr(hooks, hook))
