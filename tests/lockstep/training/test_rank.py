"""What a rank sets up before it meets the others."""

from types import SimpleNamespace

import pytest
import torch

from local_ranks import local_cluster
from lockstep.runs.errors import UserError
from lockstep.training import rank
from lockstep.training.rank import prepare_process


@pytest.fixture
def plan(monkeypatch):
    """A plan for one of two ranks on a GPU, on a machine of four cores."""
    monkeypatch.setattr(rank, "available_cores", lambda: 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    trainer = {"num_threads": "auto", "matmul_precision": "high", "deterministic": "auto"}
    yield SimpleNamespace(trainer=trainer, cluster=local_cluster(0, 2, 29500), config={"seed": 1}, accelerator="gpu")
    torch.set_float32_matmul_precision("highest")


def test_gpus_that_torch_cannot_use_are_refused(plan, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="torch .* cannot use them: update the driver"):
        prepare_process(plan)


def test_a_rank_on_a_gpu_with_few_cores_warns_and_picks_the_fastest_convolutions(plan, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    prepare_process(plan)
    assert torch.backends.cudnn.benchmark and "Each rank has 2 CPU core(s)" in caplog.text
    plan.trainer["deterministic"] = True
    prepare_process(plan)
    assert not torch.backends.cudnn.benchmark
