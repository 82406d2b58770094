"""The generators that a checkpoint carries, of one GPU and of several; the rest is in tests/test_train.py."""

import pytest
import torch

from lockstep.callbacks.checkpoints import Checkpoints, random_state, set_random_state
from lockstep.runs.errors import UserError


class Gpus:
    """torch.cuda's own calls, for GPUs that are not here; the current one is the second."""

    def __init__(self, monkeypatch, count):
        self.states = {index: torch.tensor([index], dtype=torch.uint8) for index in range(count)}
        for name, value in {
            "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: len(self.states),
            "get_rng_state": lambda: self.states[min(1, count - 1)],
            "get_rng_state_all": lambda: list(self.states.values()), "set_rng_state": self.set,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def set(self, state, device="cuda"):
        self.states[min(1, len(self.states) - 1) if device == "cuda" else device] = state


@pytest.mark.parametrize(("saved", "here", "wanted"), [(1, 1, [0]), (3, 3, [0, 1, 2]), (3, 2, [0, 1])])
def test_the_generators_of_all_gpus_of_a_process_come_back(monkeypatch, saved, here, wanted):
    Gpus(monkeypatch, saved)
    state = random_state()
    gpus = Gpus(monkeypatch, here)
    gpus.states = dict.fromkeys(range(here), torch.tensor([99], dtype=torch.uint8))
    set_random_state(state)
    assert [gpus.states[index].item() for index in range(here)] == wanted


def test_a_rank_of_several_keeps_its_own_alone(monkeypatch):
    Gpus(monkeypatch, 2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert random_state()["cuda"].item() == 1


def test_another_monitor_finds_its_own_best(tmp_path):
    before = Checkpoints(tmp_path)
    before.best_value = 0.95
    before.best = {"metric": "val/acc", "file": "best.ckpt", "value": 0.95, "epoch": 3, "step": 40}
    same, other = Checkpoints(tmp_path), Checkpoints(tmp_path, monitor="val/loss", mode="min")
    for callback in (same, other):
        callback.load_state_dict(before.state_dict())
    assert not same._improves(0.9) and other._improves(2.5)
    assert other.record_fields()["best_checkpoint"]["metric"] == {"val/acc": 0.95}


def test_no_epochs_between_saves_are_refused(tmp_path):
    with pytest.raises(UserError, match="every_n_epochs=0: 1 or more"):
        Checkpoints(tmp_path, every_n_epochs=0)
