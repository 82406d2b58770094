"""The limits of GPUs, whose allocator a stand-in answers for."""

import math

import pytest
import torch

from lockstep.batch_size import memory
from lockstep.batch_size.memory import GIB, KEPT_FREE, SEGMENT, AllocatedBytes

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def fractions(monkeypatch):
    """Two GPUs of 16 GiB, the second one with 5 GiB taken by others; what was set for each, and no block that fills."""
    found = {}
    free = {FIRST: 16 * GIB, SECOND: 11 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda f, device: found.update({device: f}))
    monkeypatch.setattr(memory, "block_apart", lambda size, device: torch.empty(size, dtype=torch.uint8, device="meta"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    return found


@pytest.mark.parametrize(
    ("fraction", "limit_gib", "limits_gib"),
    [
        (1.0, None, [16, 11]),
        (0.5, None, [8, 8]),
        (1.0, 4, [4, 4]),
        (0.5, 4, [2, 2]),  # half of the device that is played, as on a CPU and in an estimate
        (0.5, 64, [8, 8]),
    ],
)
def test_fraction_and_size_of_the_device_multiply_and_the_tightest_gpu_counts(
    fraction, limit_gib, limits_gib, fractions
):
    meter = AllocatedBytes([FIRST, SECOND], fraction, limit_gib and limit_gib * GIB)
    kept = [math.ceil(KEPT_FREE * limit * GIB / SEGMENT) * SEGMENT for limit in limits_gib]
    assert list(meter.limits.values()) == [limit * GIB - own for limit, own in zip(limits_gib, kept, strict=True)]
    if limits_gib == [16, 11]:  # all that is there: a block is held, and not counted
        assert fractions == {} and meter.held() == {"cuda:0": GIB - kept[0], "cuda:1": GIB - kept[1]}
    else:
        assert fractions == {FIRST: meter.limits["cuda:0"] / (16 * GIB), SECOND: meter.limit / (16 * GIB)}
        assert meter.held() == {"cuda:0": GIB, "cuda:1": GIB}
    assert meter.shares({"cuda:1": meter.limit}) == {"cuda:1": 1.0}
