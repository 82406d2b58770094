"""Train by torch.nn.DataParallel: one process, every GPU of this machine (trainer=dp).

Each forward cuts the batch over the GPUs and copies the weights to all of them: simple, and slower
than trainer=ddp. BatchNorm normalises with the part of each GPU.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from lockstep.strategies.base import Capabilities


class DataParallel(Capabilities, SingleDeviceStrategy):
    """Train on several GPUs; weights, optimizer and checkpoints stay on the first one.

    Args:
        num_gpus: the number of GPUs to use; None for all. With `process_devices` in
            configs/trainer/dp.yaml the launcher checks that the machine has as many.
    """

    spreads_net = True
    # Each step makes the replicas anew, and a compiled net belongs to one of them.
    supports_compile = False

    def __init__(self, num_gpus: int | None = None) -> None:
        super().__init__(device=torch.device("cuda", 0))
        count = num_gpus or torch.cuda.device_count()
        self.replicas = count
        self.process_devices = [torch.device("cuda", index) for index in range(count)]

    def model_to_device(self) -> None:
        super().model_to_device()
        device_ids = [device.index for device in self.process_devices]
        spread_forward(self.lightning_module.net, device_ids)

    def teardown(self) -> None:
        self.lightning_module.net.__dict__.pop("forward", None)
        super().teardown()


def spread_forward(net: nn.Module, device_ids: list[int]) -> None:
    """Let the net's forward go through DataParallel of a shallow copy with the same parameters."""
    parallel = _AutocastDataParallel(copy.copy(net), device_ids=device_ids)

    def forward(*inputs: Any, **keywords: Any) -> Any:
        # train() and eval() reach only the original net.
        parallel.module.training = net.training
        return parallel(*inputs, **keywords)

    net.__dict__["forward"] = forward


class _AutocastDataParallel(nn.DataParallel):
    def parallel_apply(self, replicas: Sequence[Any], inputs: Any, kwargs: Any) -> list[Any]:
        calls = [keep_autocast(replica, "cuda") for replica in replicas]
        return super().parallel_apply(calls, inputs, kwargs)


def keep_autocast(call: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Return `call` for another thread, with this thread's autocast.

    torch passes on whether autocast is enabled, but not its dtype, and would compute in fp16.
    """
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return torch.autocast(device_type, dtype=dtype, enabled=enabled)(call)
