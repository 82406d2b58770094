"""A new run that starts from a checkpoint: its head follows the class names."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lockstep.callbacks.checkpoint_io import write_checkpoint
from lockstep.runs.errors import UserError
from lockstep.training.weights import start_from


class Task(pl.LightningModule):
    def __init__(self, num_classes, width=5):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(4, width), nn.Linear(width, num_classes))


@pytest.fixture
def checkpoint(tmp_path):
    """Of a net for cat, dog and fox, and of a projection head that the next task lacks."""
    before = Task(3)
    state = {**before.state_dict(), "projection.weight": torch.ones(2)}
    own = {"config": {}, "data": {"class_names": ["cat", "dog", "fox"]}}
    write_checkpoint({"state_dict": state, "lockstep": own}, tmp_path / "before.ckpt")
    return before, str(tmp_path / "before.ckpt")


def started(checkpoint, class_names):
    module = Task(len(class_names))
    said = start_from(module, checkpoint[1], "m", {}, {"class_names": class_names, "data_hash": "x", "image_size": 2})
    return module.net, said


def test_the_same_classes_in_another_order_keep_their_logits(checkpoint):
    net, said = started(checkpoint, ["fox", "cat", "dog"])
    images = torch.randn(3, 4)
    assert torch.equal(net(images), checkpoint[0].net(images)[:, [2, 0, 1]])
    assert "the head's rows are in this run's order of classes; skipped projection" in said


@pytest.mark.parametrize("names", [["cat", "dog", "gnu"], ["cat", "dog"], ["cat", "dog", "fox", "gnu"]])
def test_other_classes_get_a_new_head_on_the_trained_body(checkpoint, names):
    net, said = started(checkpoint, names)
    assert torch.equal(net[1].weight, checkpoint[0].net[1].weight) and not net(torch.randn(3, 4)).any()
    assert f"the head is new (net.2.bias, net.2.weight): the classes were cat, dog, fox, now {', '.join(names)}" in said


def test_another_net_is_refused(checkpoint):
    facts = {"class_names": ["cat", "dog", "fox"], "data_hash": "x", "image_size": 2}
    with pytest.raises(UserError, match=r"net.1.bias is \(5,\) there, \(6,\) here"):
        start_from(Task(3, width=6), checkpoint[1], "m", {}, facts)
