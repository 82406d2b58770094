"""torch.compile: where `auto` compiles, and that an evaluation runs the net as it is."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lockstep.ranks.find import Cluster
from lockstep.records.batch import Batch
from lockstep.records.folder import RunFolder
from lockstep.runs.run import Run
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp import FSDP
from lockstep.training import compilation
from lockstep.training.compilation import EagerEvaluation, should_compile
from strategies.model_parallel import ModelParallel


@pytest.mark.parametrize(
    ("strategy", "changes", "expected"),
    [
        ("auto", {}, True),
        (DDP, {}, True),
        (FSDP, {}, False),
        (ModelParallel, {}, False),
        ("auto", {"accelerator": "cpu"}, False),
        ("auto", {"max_epochs": 19}, False),
        ("auto", {"max_steps": 1999}, False),
        ("auto", {"max_epochs": None, "max_steps": 2000}, True),
        ("auto", {"automatic_optimization": False}, False),
        ("auto", {"tools": False}, False),
    ],
)
def test_auto_compiles_long_runs_on_gpus(strategy, changes, expected, monkeypatch):
    given = {
        "accelerator": "gpu",
        "max_epochs": 20,
        "max_steps": -1,
        "automatic_optimization": True,
        "tools": True,
    }
    given |= changes
    own = {"compile": "auto", "max_epochs": given["max_epochs"], "max_steps": given["max_steps"]}
    cluster = Cluster("none", 1, 1, 0, 0, "127.0.0.1", None, accelerator=given["accelerator"])
    run = Run({"trainer": own}, cluster, RunFolder(Path("r")), Batch(128, 128, 1))
    data = SimpleNamespace(attach_to_ranks=None, steps_per_epoch=100)
    module = SimpleNamespace(
        net=nn.Linear(1, 1), automatic_optimization=given["automatic_optimization"]
    )
    monkeypatch.setattr(
        compilation.importlib.util, "find_spec", lambda name: given["tools"] or None
    )
    monkeypatch.setattr(shutil, "which", lambda name: name)
    made = object.__new__(strategy) if isinstance(strategy, type) else strategy
    assert should_compile(module, data, run, made) is expected


def test_an_evaluation_is_not_compiled():
    compiled_graphs = []

    def backend(graph, inputs):
        compiled_graphs.append(graph)
        return graph

    net, callback = nn.Linear(2, 2), EagerEvaluation()
    net.compile(backend=backend)
    callback.on_validation_start()
    net(torch.ones(3, 2))
    assert not compiled_graphs
    callback.on_validation_end()
    net(torch.ones(4, 2))
    assert len(compiled_graphs) == 1
