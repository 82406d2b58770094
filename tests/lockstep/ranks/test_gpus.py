"""GPUs that this build of torch cannot use are refused, with the build that can."""

import pytest
import torch

from lockstep.process.errors import UserError
from lockstep.process.gpu_builds import Card, Machine
from lockstep.ranks import gpus
from lockstep.ranks.gpus import refuse_unusable_gpus


@pytest.fixture
def shown(monkeypatch):
    """A function that lets torch and the driver show GPUs of these capabilities."""

    def show(*capabilities, driver="580.95.05"):
        cards = [Card("card", capability) for capability in capabilities]
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "card")
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        monkeypatch.setattr(gpus, "read_machine", lambda: Machine(driver, cards))

    return show


def no_driver():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")


def test_a_gpu_without_kernels_names_the_build(shown):
    shown((9, 0), (7, 0))
    with pytest.raises(UserError, match="no kernels for card .capability 7.0.*DEVICE=cu126"):
        refuse_unusable_gpus([1])


def test_a_stale_choice_of_gpus_is_named(shown, monkeypatch):
    def no_gpu():
        raise RuntimeError("No CUDA GPUs are available\nand a second line")

    shown((9, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr(torch.cuda, "init", no_gpu)
    reason = r"\(No CUDA GPUs are available, with CUDA_VISIBLE_DEVICES=1\)\. "
    with pytest.raises(UserError, match=reason):
        refuse_unusable_gpus([0])


def test_a_gpu_that_cuda_does_not_see_is_named(shown, monkeypatch):
    shown((9, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7")
    with pytest.raises(UserError, match="no GPU 1: CUDA sees 1, with CUDA_VISIBLE_DEVICES=0,7"):
        refuse_unusable_gpus([0, 1])


def test_a_gpu_without_use_is_not_looked_at(shown):
    shown((9, 0), (7, 0))
    refuse_unusable_gpus([0])


def test_a_driver_that_is_too_old_names_the_build(shown, monkeypatch):
    shown((8, 0), driver="535.54.03")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(UserError, match="cannot use the driver's GPUs.*DEVICE=cu126.*535.54.03"):
        refuse_unusable_gpus([0])


def test_a_build_that_fits_is_not_to_be_installed_again(shown, monkeypatch):
    shown((8, 0))
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    with pytest.raises(UserError, match="The driver is 580.95.05: mend it"):
        refuse_unusable_gpus([0])
