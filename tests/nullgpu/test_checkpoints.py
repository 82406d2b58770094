"""Checkpoints on null GPUs: one wait for all copies, and any trainer's are any other's."""

import warnings
from pathlib import Path

import pytest
import torch

from lockstep.callbacks.checkpoint_io import write_checkpoint
from lockstep.storage.load import read_checkpoint
from lockstep.strategies.sharded_state import full_optimizer_state, full_state_dict
from null_gpus import call_on_null_gpus, needs_null_gpus, run_on_null_gpus
from null_runs import FLOAT32, SMALL, agree

pytestmark = needs_null_gpus


def state_of(device: str) -> dict:
    """Twelve tensors, two of them in one memory."""
    own = {f"w{n}": torch.arange(n + 1.0, device=device) for n in range(11)}
    return own | {"tied": own["w5"][2:]}


def waits(work) -> int:
    """How often a function waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


def waits_of_writing(path: Path) -> int:
    optimizer = {"state": {0: {"m": torch.ones(3, device="cuda")}}, "param_groups": []}
    state = {"state_dict": state_of("cuda"), "optimizer_states": [optimizer]}
    return waits(lambda: write_checkpoint(state, path))


def waits_of_gathering() -> list[int]:
    state = state_of("cuda")
    steps = {"state": dict.fromkeys(range(9), {"m": torch.ones(3, device="cuda")}), "param_groups": []}
    return [waits(lambda: full_state_dict(state, True)), waits(lambda: full_optimizer_state(steps, True))]


@pytest.mark.slow
def test_all_tensors_are_copied_with_one_wait(tmp_path):
    path = tmp_path / "x.ckpt"
    assert call_on_null_gpus(waits_of_writing, path) == 1
    checkpoint, expected = read_checkpoint(path), state_of("cpu")
    found = checkpoint["state_dict"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(checkpoint["optimizer_states"][0]["state"][0]["m"], torch.ones(3))
    assert found["tied"].untyped_storage().data_ptr() == found["w5"].untyped_storage().data_ptr()


@pytest.mark.slow
def test_shards_are_gathered_with_one_wait():
    assert call_on_null_gpus(waits_of_gathering) == [1, 1]


WRITERS = ("ddp", "fsdp")
READERS = ("gpu", "ddp", "fsdp", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_a_run_goes_on_under_another_trainer_and_is_evaluated_by_any(writer, tmp_path):
    words = [*SMALL, FLOAT32, "run_id=r", f"trainer={writer.split()[0]}", *writer.split()[1:]]
    whole = [*words, "trainer.max_epochs=2", "scheduler=none"]
    expected = run_on_null_gpus("train", *whole, logs=tmp_path / "whole", devices=2).record["metrics"]
    first = run_on_null_gpus("train", *words, "scheduler=none", logs=tmp_path, devices=2)
    assert first.code == 0, first.output
    again = ["resume=r", "trainer=gpu", "trainer.max_epochs=2", FLOAT32]
    second = run_on_null_gpus("train", *again, logs=tmp_path, devices=2)
    assert second.code == 0, second.output
    assert second.record["epochs"] == 2 and agree(second.record["metrics"], expected)
    for reader in READERS:
        done = run_on_null_gpus("eval", "ckpt_path=r", f"trainer={reader}", FLOAT32, logs=tmp_path, devices=2)
        assert done.code == 0, done.output
        assert done.record["metrics"]["test/correct"] == second.record["metrics"]["test/correct"]
