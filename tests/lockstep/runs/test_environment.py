"""How many GPUs are to be seen, and by which interface an address is reached."""

import pytest

from lockstep.runs.environment import network_interface, visible_gpus


@pytest.mark.parametrize(
    ("chosen", "count"), [("0,3", 2), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-1f, 2,-1,3", 2)]
)
def test_chosen_gpus_are_counted_without_a_driver(chosen, count):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_the_interface_of_an_address():
    assert network_interface("127.0.0.1") == "lo"
    assert network_interface("no.such.host.invalid") is None
