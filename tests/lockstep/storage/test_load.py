"""Checkpoint files are tensors and plain values; anything else is refused in one sentence."""

from collections import Counter

import numpy as np
import pytest
import torch

from kills import differences
from lockstep.callbacks.resume_point import random_state
from lockstep.runs.errors import UserError
from lockstep.storage.load import read_checkpoint

DTYPES = (torch.bfloat16, torch.float16, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn, torch.float64)


def whole():
    """A checkpoint as a run writes it, in small."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    facts = {"class_names": ["a", "ü"], "num_classes": 2, "image_size": 8, "channels": 1, "mean": [0.5], "std": [0.2]}
    more = {f"extra{n}": torch.zeros(3, 2, dtype=dtype) for n, dtype in enumerate(DTYPES)}
    return {
        "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.6.6", "state_dict": net.state_dict() | more,
        "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {"Checkpoints": {"best_value": 0.5}},
        "optimizer_states": [optimizer.state_dict()], "lr_schedulers": [{"milestones": Counter([1, 2]), "last": 3}],
        "lockstep": {"config": {"model": {"widths": [1, 2]}, "seed": None}, "data": facts, "random": [random_state()]},
    }  # fmt: skip


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path):
    content = whole()
    torch.save(content, tmp_path / "x.ckpt")
    found = read_checkpoint(tmp_path / "x.ckpt")
    assert type(found["state_dict"]) is dict and found["lr_schedulers"] == content["lr_schedulers"]
    assert differences(found, content) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state_dict": []}, "it holds no state_dict"),
        ({"state_dict": {"a": 1}}, "its state_dict is not tensors by name"),
        ({"lockstep": ["nonsense"]}, "its lockstep is a list"),
        ({"lockstep": {"config": "x"}}, "its config is a str"),
        ({"lockstep": {"data": {"class_names": "abc"}}}, "its data.class_names is 'abc'"),
        ({"extra": np.float64(1.0)}, "UnpicklingError"),
    ],
    ids=str,
)
def test_another_content_is_named(changes, says, tmp_path):
    torch.save({**whole(), **changes}, tmp_path / "x.ckpt")
    with pytest.raises(UserError, match=f"x.ckpt is not a checkpoint that can be loaded safely: .*{says}") as raised:
        read_checkpoint(tmp_path / "x.ckpt")
    assert "\n" not in str(raised.value)


def test_a_damaged_file_is_one_sentence(tmp_path):
    path = tmp_path / "x.ckpt"
    with pytest.raises(UserError, match=r"There is no checkpoint .*x\.ckpt\."):
        read_checkpoint(path)
    torch.save(whole(), path)
    data = path.read_bytes()
    for damaged in (b"", data[:-100], data[:1000], b"x" * 1000, data[:40] + bytes(200) + data[240:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="x.ckpt is not a checkpoint that can be loaded safely"):
            read_checkpoint(path)
