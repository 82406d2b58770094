"""What FSDP allocates in streams of its own, for steps on fake tensors.

A GPU's allocator gives memory of one stream to no other one: a peak is the sum of each stream's own.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lockstep.batch_size.memory import SEGMENT, TrackedBytes


class Stream:
    """Bytes that live in one stream, and their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def allocate(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        taken = math.prod(size) * dtype.itemsize
        self.now += taken
        self.peak = max(self.peak, self.now)
        tensor = torch.empty(size, dtype=dtype, device=device)
        weakref.finalize(tensor.untyped_storage(), self._free, taken)
        return tensor

    def _free(self, taken: int) -> None:
        self.now -= taken


class Gathers:
    """fully_shard's all-gathers; what they gather into lies in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.stream.allocate(size, dtype, device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Reductions:
    """fully_shard's reduce-scatters; a rank's share of the gradients lies in a stream, what it is made of does not."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.of_share = stream, False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        of_share, self.of_share = self.of_share, not self.of_share  # it asks for the whole, then for the share
        return self.stream.allocate(size, dtype, device) if of_share else torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_single(output_tensor, input_tensor, group=group, op=op, async_op=async_op)


class InStreams(pl.Callback):
    """Has FSDP's units allocate in these streams; the tracker counts what lies in none.

    Args:
        tracker: of all bytes.
    """

    def __init__(self, tracker: "OutsideStreams") -> None:
        self.streams = tracker.streams

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        gathered, reduced = self.streams
        units: list[Any] = [each for each in module.modules() if isinstance(each, FSDPModule)]
        for unit in units:
            unit.set_custom_all_gather(Gathers(gathered))
            unit.set_custom_reduce_scatter(Reductions(reduced))


class OutsideStreams(TrackedBytes):
    """The bytes of all tensors but those of FSDP's streams."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = (Stream(), Stream())
        self.peak = 0

    @property
    def beside(self) -> int:
        """Bytes reserved for the streams at their peaks, in whole segments."""
        return sum(math.ceil(stream.peak / SEGMENT) * SEGMENT for stream in self.streams)

    def peaks(self) -> dict[str, int]:
        return {"": self.peak}

    def reset(self) -> None:
        super().reset()
        self.peak = self._outside()

    def _outside(self) -> int:
        return self.now() - sum(stream.now for stream in self.streams)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self._outside())
        return result
