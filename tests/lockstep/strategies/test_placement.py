"""What each trainer's options ask of a machine."""

import pytest

from lockstep.config.compose import compose, plain
from lockstep.runs.errors import UserError
from lockstep.strategies.placement import RequestedDevices, in_one_process, place


def options(*words):
    return plain(compose("train", list(words)))["trainer"]


@pytest.mark.parametrize(
    ("words", "gpus", "accelerator", "wanted"),
    [
        (["trainer=default"], 3, "gpu", RequestedDevices(None, None, True, 3)),
        (["trainer=ddp_sim"], 3, "cpu", RequestedDevices(2, None, True, 1)),
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
        (["trainer=ddp"], "ddp", 0, "trainer=ddp asks for 1 GPU and this machine has no GPU: trainer=ddp_sim works"),
        (["trainer=fsdp", "trainer.devices=4"], "fsdp", 2, "asks for 4 GPUs and this machine has 2 GPUs"),
        (["trainer=dp"], "dp", 1, "asks for 2 GPUs and this machine has 1 GPU: trainer=ddp_sim works"),
        (["trainer=dp", "trainer.devices=2"], "dp", 2, "dp takes trainer.num_gpus"),
        (["trainer=cpu", "trainer.num_nodes=2"], "cpu", 0, "is one process: trainer=ddp (on CPUs ddp_sim) has several"),
        (["trainer=ddp_sim", "++trainer.devices=0"], "ddp_sim", 0, "trainer.devices=0: give a number from 1 on"),
    ],
)
def test_what_cannot_be_is_refused_with_what_works(words, name, gpus, said):
    with pytest.raises(UserError) as refused:
        place(options(*words), name, gpus)
    assert said in str(refused.value)


def test_an_evaluation_runs_in_one_process_whatever_trained():
    for trainer in ("fsdp", "dp", "model_parallel", "hivemind"):
        own = in_one_process(options(f"trainer={trainer}"), "cpu")
        assert place(own, "some", 0) == ("cpu", RequestedDevices(1, 1, False, 1)), trainer
        assert own["strategy"] is None and not {"num_gpus", "stage_devices", "cut"} & own.keys()
