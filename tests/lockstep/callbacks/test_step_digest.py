"""The lines of a step: parts of batches, hashes of samples, calls of generators."""

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import broken_modules
from lockstep.callbacks.step_digest import (
    DROPOUTS,
    StepDigest,
    batch_part,
    digest,
    find_random_calls,
    hash_samples,
)
from plain_task import Small, fit


def test_a_batch_is_cut_through_all_its_tensors():
    batch = {"x": torch.arange(4), "rest": (torch.arange(8).view(4, 2), ["a", "b", "c", "d"], 7)}
    part = batch_part(batch, 1, 2)
    assert part["x"].tolist() == [2, 3]
    assert part["rest"][0].tolist() == [[4, 5], [6, 7]]
    assert part["rest"][1:] == (["c", "d"], 7)


def test_equal_samples_have_equal_hashes():
    first, second, third = hash_samples([torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0, 1, 0])])
    assert first[0] == second[0] != third[0]
    assert first[1] == third[1] != second[1]


def test_a_digest_is_that_of_float64():
    tensor = torch.tensor([3.0, 4.0])
    assert digest(tensor) == digest(tensor.double())
    assert digest(tensor)[1] == 5.0


@pytest.mark.parametrize(
    ("cls", "is_unseeded"),
    [(broken_modules.NoisyRows, True), (broken_modules.CopiedRows, False)],
)
def test_calls_of_generators_are_named_by_line(cls, is_unseeded):
    calls = find_random_calls(cls)
    assert any(unseeded for unseeded, _ in calls) is is_unseeded
    assert "broken_modules.py:" in calls[0][1]


def test_a_fit_leaves_a_line_for_each_step(tmp_path, monkeypatch):
    for name in DROPOUTS:
        # The callback turns them off in its process.
        monkeypatch.setattr(nn.functional, name, getattr(nn.functional, name))
    fit(Small(), StepDigest(tmp_path), batches=3, logger=False)
    rows = [json.loads(line) for line in (tmp_path / "steps-rank0.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[0]["loss"] != steps[1]["loss"]
    assert steps[0]["learning_rates"] == [0.25]
    assert set(steps[0]["weights"]) == {"layer.weight", "layer.bias"}
    assert not steps[0]["draws"]


class Seen(Small):
    """It keeps which batches it was validated with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append((dataloader_idx, batch.tolist()))


def test_each_validation_loader_replays_its_own_batches(tmp_path, monkeypatch):
    for name in DROPOUTS:
        monkeypatch.setattr(nn.functional, name, getattr(nn.functional, name))
    first, second = Seen(), Seen()
    loaders = [DataLoader(torch.ones(4, 2), 2), DataLoader(torch.zeros(3, 2), 2)]
    options = {"val_loader": loaders, "logger": False, "num_sanity_val_steps": -1}
    reference = str(tmp_path / "reference")
    fit(first, StepDigest(reference, keeps_batches=True), **options)
    fit(second, StepDigest(str(tmp_path / "again"), replay=reference), **options)
    assert len(first.seen) == 8 and second.seen == first.seen
    rows = (tmp_path / "reference/steps-rank0.jsonl").read_text().splitlines()
    [setup] = [row for row in map(json.loads, rows) if row["kind"] == "facts"]
    assert setup["smallest_validation_batch"] == 1 and setup["num_workers"] == [0]
