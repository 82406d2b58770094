"""Where ranks run, DataParallel, and activations that are computed again."""

import copy
import threading

import pytest
import torch
from torch import nn

from lockstep.config.compose import compose, plain
from lockstep.runs.errors import UserError
from lockstep.strategies import data_parallel
from lockstep.strategies.placement import RequestedDevices, place
from lockstep.strategies.recompute import recompute_activations
from strategy_runs import TinyNet, one, worst


def options(*words):
    return plain(compose("train", list(words)))["trainer"]


@pytest.mark.parametrize(
    ("words", "gpus", "accelerator", "wanted"),
    [
        (["trainer=default"], 3, "gpu", RequestedDevices(None, None, True, 3)),
        (["trainer=ddp_sim"], 3, "cpu", RequestedDevices(None, None, True, 2)),
        (["trainer=ddp_sim", "trainer.devices=4"], 0, "cpu", RequestedDevices(4, None, True, 2)),
        (["trainer=default"], 0, "cpu", RequestedDevices(None, None, True, 1)),
        (["trainer=fsdp", "trainer.devices=2", "trainer.num_nodes=4"], 2, "gpu", RequestedDevices(2, 4, True, 2)),
        (["trainer=dp"], 4, "gpu", RequestedDevices(1, 1, False, 4)),
        (["trainer=model_parallel", "trainer.stage_devices=[cpu,cpu]"], 4, "cpu", RequestedDevices(1, 1, False, 1)),
        (["trainer=model_parallel", "trainer.stage_devices=[cuda:0,cpu]"], 1, "gpu", RequestedDevices(1, 1, False, 1)),
        (["trainer=hivemind"], 0, "cpu", RequestedDevices(1, 1, False, 1)),
    ],
)
def test_what_is_asked_of_the_launcher(words, gpus, accelerator, wanted):
    assert place(options(*words), "some", gpus) == (accelerator, wanted)


@pytest.mark.parametrize(
    ("words", "name", "gpus", "said"),
    [
        (["trainer=ddp"], "ddp", 0, "has no GPU: experiment=quickstart trainer=ddp_sim works"),
        (["trainer=fsdp", "trainer.devices=4"], "fsdp", 2, "asks for 4 GPUs and this machine has 2 GPUs"),
        (["trainer=dp"], "dp", 1, "has 1 GPU: experiment=quickstart trainer=ddp_sim works"),
        (["trainer=dp", "trainer.devices=2"], "dp", 2, "dp takes trainer.num_gpus"),
        (["trainer=cpu", "trainer.num_nodes=2"], "cpu", 0, "is one process: trainer=ddp (on CPUs ddp_sim) has several"),
        (["trainer=ddp_sim", "++trainer.devices=0"], "ddp_sim", 0, "trainer.devices=0: give a number from 1 on"),
    ],
)
def test_what_cannot_be_is_refused_with_what_works(words, name, gpus, said):
    with pytest.raises(UserError) as refused:
        place(options(*words), name, gpus)
    assert said in str(refused.value)


# Activations that are computed again leave losses and weights as they are, under every strategy.


def test_one_process_has_the_same_losses_and_weights():
    expected, found = one(), one(recompute=True)
    assert found["losses"] == expected["losses"] and worst(found["weights"], expected["weights"]) == 0
    assert found["val"] == expected["val"]


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x).tanh()


class Net(nn.Sequential):
    def shard_units(self):
        return list(self)


def test_a_unit_computes_twice_in_training_once_in_evaluation_and_so_does_a_copy():
    net = Net(Counting(), Counting())
    names = list(net.state_dict())
    recompute_activations(net)
    assert list(net.state_dict()) == names and all(isinstance(block, Counting) for block in net)
    for each in (copy.deepcopy(net), net):
        each(torch.ones(2, 4)).sum().backward()
        assert [block.calls for block in each] == [2, 2]
        assert all(p.grad is not None for p in each.parameters())
        with torch.no_grad():
            each(torch.ones(2, 4))
        assert [block.calls for block in each] == [3, 3]


def test_what_cannot_be_computed_again_is_refused():
    with pytest.raises(UserError, match="BatchNorm's statistics twice"):
        recompute_activations(Net(Counting(), nn.BatchNorm1d(4)))
    with pytest.raises(UserError, match="needs shard_units.. of Linear"):
        recompute_activations(nn.Linear(1, 1))


# DataParallel spreads the forward and keeps the net.


class Recorder(nn.DataParallel):
    """Two replicas on the CPU, as nn.DataParallel makes them on GPUs."""

    def forward(self, images):
        replicas = [self.module, self.module]
        return torch.cat([replica(part) for replica, part in zip(replicas, images.chunk(2), strict=True)])


class Dropping(TinyNet):
    def forward(self, images):
        return nn.functional.dropout(super().forward(images), 0.99, training=self.training)


def test_forward_is_spread_names_stay_and_the_replicas_follow_train_and_eval(monkeypatch):
    monkeypatch.setattr(data_parallel, "_Spread", Recorder)
    net = Dropping().eval()
    names, images = list(net.state_dict()), torch.randn(64, 1, 3, 4)
    expected = net(images)
    data_parallel.spread_forward(net, [0, 1])
    torch.testing.assert_close(net(images), expected)
    net(images).sum().backward()
    assert list(net.state_dict()) == names and all(parameter.grad is not None for parameter in net.parameters())
    assert (net.train()(images) == 0).any()


def dtype_in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call(torch.randn(2, 4)).dtype))
    thread.start()
    thread.join()
    return found[0]


def test_threads_compute_in_the_dtype_of_autocast_here():
    """torch's own threads know that autocast is on and forget in which dtype."""
    linear = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        assert dtype_in_a_thread(data_parallel.under_this_autocast(linear, "cpu")) == torch.float16
    assert dtype_in_a_thread(data_parallel.under_this_autocast(linear, "cpu")) == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_logits_of_one():
    net, images = TinyNet().cuda(), torch.randn(8, 1, 3, 4).cuda()
    expected = net(images)
    data_parallel.spread_forward(net, [0, 1])
    torch.testing.assert_close(net(images), expected)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert net(images).dtype == torch.bfloat16
