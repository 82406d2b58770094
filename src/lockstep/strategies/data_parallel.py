"""Train by torch.nn.DataParallel: one process, every GPU of this machine (trainer=dp).

Each forward cuts the batch over the GPUs and copies the weights to all of them: simple, and slower than trainer=ddp.
BatchNorm normalises with the part of each GPU.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lockstep.strategies.base import Capabilities


class DataParallel(Capabilities, SingleDeviceStrategy):
    """Weights, optimizer and checkpoints are those of the plain net on the first GPU.

    Args:
        num_gpus: how many to use; None for all. placement.py checks that there are two or more.
    """

    supports_compile = False  # the replicas are made anew in each step

    def __init__(self, num_gpus: int | None = None) -> None:
        super().__init__(device=torch.device("cuda", 0))
        self.process_devices = [torch.device("cuda", index) for index in range(num_gpus or torch.cuda.device_count())]

    def model_to_device(self) -> None:
        super().model_to_device()
        spread_forward(self.lightning_module.net, [device.index for device in self.process_devices])

    def teardown(self) -> None:
        self.lightning_module.net.__dict__.pop("forward", None)
        super().teardown()


def spread_forward(net: nn.Module, device_ids: list[int]) -> None:
    """Route the net's forward through nn.DataParallel of a shallow copy, which shares every parameter."""
    parallel = _Spread(copy.copy(net), device_ids=device_ids)

    def forward(*inputs: Any, **named: Any) -> Any:
        parallel.module.training = net.training  # train() and eval() reach the original alone
        return parallel(*inputs, **named)

    net.__dict__["forward"] = forward


class _Spread(nn.DataParallel):
    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        return super().parallel_apply([under_this_autocast(replica, "cuda") for replica in replicas], inputs, kwargs)


def under_this_autocast(call: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Return `call` for another thread: torch takes autocast along, but not its dtype, and would compute in fp16."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype=dtype, enabled=enabled)(call)
