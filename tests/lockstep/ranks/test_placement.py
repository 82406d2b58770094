"""Where ranks run, and activations that are computed again."""

import copy

import pytest
import torch
from torch import nn

from lockstep.config.compose import compose, plain
from lockstep.process.errors import UserError
from lockstep.ranks.placement import RequestedDevices, one_process_options, resolve_devices
from lockstep.strategies.recompute import recompute_activations
from strategy_runs import one, worst


def options(*words):
    return plain(compose("train", list(words)))["trainer"]


def test_devices_without_a_trainer_are_refused():
    trainer = options("trainer=ddp_sim", "trainer.devices=4")
    assert one_process_options(trainer, set())["devices"] == 1
    with pytest.raises(UserError, match=r"trainer\.devices=4 needs trainer=, as trainer=ddp"):
        one_process_options(trainer, {"trainer.devices"})


@pytest.mark.parametrize(
    ("words", "gpus", "accelerator", "wanted"),
    [
        (["trainer=default"], 3, "gpu", RequestedDevices(None, None, True, 3)),
        (["trainer=ddp_sim"], 3, "cpu", RequestedDevices(None, None, True, 2)),
        (["trainer=ddp_sim", "trainer.devices=4"], 0, "cpu", RequestedDevices(4, None, True, 2)),
        (["trainer=default"], 0, "cpu", RequestedDevices(None, None, True, 1)),
        (
            ["trainer=fsdp", "trainer.devices=2", "trainer.num_nodes=4"],
            2,
            "gpu",
            RequestedDevices(2, 4, True, 2),
        ),
        (["trainer=dp"], 4, "gpu", RequestedDevices(1, 1, False, 4)),
        (
            ["trainer=model_parallel", "trainer.stage_devices=[cpu,cpu]"],
            4,
            "cpu",
            RequestedDevices(1, 1, False, 1),
        ),
        (
            ["trainer=model_parallel", "trainer.stage_devices=[cuda:0,cpu]"],
            1,
            "gpu",
            RequestedDevices(1, 1, False, 1),
        ),
        (["trainer=hivemind"], 0, "cpu", RequestedDevices(1, 1, False, 1)),
        (["trainer=ddp_model_parallel"], 4, "gpu", RequestedDevices(None, None, True, 2, 2)),
        (
            ["trainer=ddp_model_parallel", "trainer.devices=6", "trainer.stages=3"],
            8,
            "gpu",
            RequestedDevices(2, None, True, 8, 3),
        ),
        (["trainer=ddp_model_parallel_sim"], 0, "cpu", RequestedDevices(None, None, True, 2, 2)),
    ],
)
def test_what_is_asked_of_the_launcher(words, gpus, accelerator, wanted):
    assert resolve_devices(options(*words), "some", gpus) == (accelerator, wanted)


@pytest.mark.parametrize(
    ("words", "name", "gpus", "said"),
    [
        (["trainer=ddp"], "ddp", 0, "has no GPU: experiment=quickstart trainer=ddp_sim works"),
        (
            ["trainer=fsdp", "trainer.devices=4"],
            "fsdp",
            2,
            "asks for 4 GPUs and this machine has 2 GPUs",
        ),
        (["trainer=dp"], "dp", 1, "has 1 GPU: experiment=quickstart trainer=cpu works"),
        (["trainer=dp", "trainer.devices=2"], "dp", 2, "dp takes trainer.num_gpus"),
        (
            ["trainer=cpu", "trainer.num_nodes=2"],
            "cpu",
            0,
            "is one process: trainer=ddp (on CPUs ddp_sim) has several",
        ),
        (
            ["trainer=ddp_sim", "++trainer.devices=0"],
            "ddp_sim",
            0,
            "trainer.devices=0: give a number from 1 on",
        ),
        (
            ["trainer=ddp_model_parallel"],
            "ddp_model_parallel",
            1,
            "asks for 2 GPUs and this machine has 1 GPU: experiment=quickstart "
            "trainer=ddp_model_parallel_sim works here",
        ),
        (
            ["trainer=ddp_model_parallel"],
            "ddp_model_parallel",
            5,
            "5 devices of a node do not divide into ranks of 2 devices: pass trainer.devices=4",
        ),
        (
            ["trainer=ddp_model_parallel_sim", "trainer.devices=1"],
            "ddp_model_parallel_sim",
            0,
            "1 devices of a node do not divide into ranks of 2 devices: pass trainer.devices=2",
        ),
        (
            ["trainer=ddp_model_parallel", "trainer.stages=0"],
            "ddp_model_parallel",
            2,
            "trainer.process_devices=0: give a number from 1 on",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_works(words, name, gpus, said):
    with pytest.raises(UserError) as refused:
        resolve_devices(options(*words), name, gpus)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("process_devices", "gpus", "refused"),
    [(2, 1, True), (2, 2, False), (["cpu", "cuda:0"], 0, False)],
)
def test_a_new_trainer_states_the_devices_of_its_process(process_devices, gpus, refused):
    trainer = {**options("trainer=gpu"), "process_devices": process_devices}
    if refused:
        with pytest.raises(UserError, match="trainer=mine asks for 2 GPUs .* trainer=cpu works"):
            resolve_devices(trainer, "mine", gpus)
    else:
        accelerator, _ = resolve_devices(trainer, "mine", gpus)
        assert accelerator == ("gpu" if process_devices == 2 else "cpu")


# Activations that are computed again leave losses and weights as they are, under every strategy.


def test_one_process_has_the_same_losses_and_weights():
    expected, found = one(), one(recompute=True)
    assert (
        found["losses"] == expected["losses"] and worst(found["weights"], expected["weights"]) == 0
    )
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


def test_a_recomputed_unit_computes_twice_in_training_alone():
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
