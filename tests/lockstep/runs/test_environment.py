"""How many GPUs are to be seen, and by which interface an address is reached."""

import sys

import pytest

from lockstep.runs.environment import network_interface, visible_gpus


@pytest.mark.parametrize(
    ("chosen", "count"), [("0,3", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-1f, 2,-1,3", 2)]
)
def test_chosen_gpus_are_counted_without_a_driver(chosen, count):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == count


@pytest.mark.parametrize(("error", "counted"), [(0, 3), (100, 0), (None, 0)])
def test_without_nvml_cuda_itself_counts_gpus(error, counted, monkeypatch):
    class Cuda:
        def cuInit(self, flags):
            return error

        def cuDeviceGetCount(self, count):
            count._obj.value = 3
            return 0

    def library(name):
        if error is None:
            raise OSError(f"{name}: no such file")
        return Cuda()

    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    monkeypatch.setattr("os.path.exists", lambda path: True)
    monkeypatch.setattr("ctypes.CDLL", library)
    assert visible_gpus({}) == counted


def test_the_interface_of_an_address():
    assert network_interface("127.0.0.1") == "lo"
    assert network_interface("no.such.host.invalid") is None
