"""What a rank sets up before it meets the others."""

import sys
from types import SimpleNamespace

import pytest
import torch

from local_ranks import local_cluster
from lockstep.runs.errors import UserError
from lockstep.training import rank
from lockstep.training.rank import prepare_process, set_breakpoints


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


def test_breakpoint_is_of_rank_zero_on_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    set_breakpoints(local_cluster(0, 2, 29500))
    assert sys.breakpointhook is sys.__breakpointhook__, "the debugger of rank 0"
    set_breakpoints(local_cluster(1, 2, 29500))
    breakpoint()  # goes on
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False))
    set_breakpoints(local_cluster(0, 2, 29500))
    with pytest.raises(UserError, match="needs a terminal: debug with trainer=cpu"):
        breakpoint()
