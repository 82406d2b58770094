"""Uses torch's `_tools.mem_tracker` and `_disable_current_modes`: nothing public counts the bytes of live tensors.

The peak of memory in each phase of a step, of the GPU's allocator or of tracked bytes, against a limit.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.batch_size.search import HELD, RESERVED

GIB = 2**30
KEPT_FREE = 0.01  # of a GPU's memory, for gaps
SEGMENT = 20 * 2**20  # in whole ones: the allocator takes so much at a time
OUT_OF_MEMORY_WORDS = (
    "out of memory", "can't allocate memory", "ALLOC_FAILED", "Failed to CUDA calloc", "unable to mmap",
)  # fmt: skip


class OutOfTrackedMemory(RuntimeError):
    """The tracked bytes went over the limit: what a device of that size would have answered."""


def ran_out(error: BaseException) -> bool:
    """Whether an exception says that some memory, of a device or of the host, was not enough."""
    if isinstance(error, OutOfTrackedMemory | torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY_WORDS)


class TrackedBytes(MemTracker):
    """The bytes of all tensors that live at once, on devices whose allocator cannot be asked, or under fake tensors.

    A context; storages made inside are counted, others by `track_external`.

    Args:
        limit: bytes; more raises OutOfTrackedMemory at the operation that needs them. None: no limit.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit = limit

    def fresh(self) -> "TrackedBytes":
        """One that knows nothing of what was tracked so far."""
        return TrackedBytes(self.limit)

    def now(self) -> int:
        return sum(held["Total"] for device, held in self._curr_mem_snap.items() if device.type != "meta")

    def peaks(self) -> dict[str, int]:
        """Since the last reset."""
        return {"": sum(peak for device, peak in self._peak_mem.items() if device.type != "meta")}

    def held(self) -> dict[str, int]:
        return {"": self.now()}

    def reserved(self) -> dict[str, int]:
        return {}

    def reset(self) -> None:
        self._peak_mem = {device: held["Total"] for device, held in self._curr_mem_snap.items()}

    def shares(self, bytes_of: dict[str, int]) -> dict[str, float]:
        return {name: value / (self.limit or 1) for name, value in bytes_of.items()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.limit is not None and self.now() > self.limit:
            raise OutOfTrackedMemory(f"{func} needs {self.now()} bytes of {self.limit}")
        return result

    # MemTracker attributes bytes to modules through these, and refuses a second iteration: only the sum is wanted.
    def _pre_fw_hook(self, module: Any, inputs: Any) -> None: ...
    def _post_fw_hook(self, module: Any, inputs: Any, outputs: Any) -> None: ...
    def _pre_bw_hook(self, module: Any, args: Any) -> None: ...
    def _post_bw_hook(self, module: Any, args: Any) -> None: ...


def block_apart(size: int, device: torch.device) -> torch.Tensor:
    """In a stream of its own, so that whole segments hold it and nothing else."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        return torch.empty(size, dtype=torch.uint8, device=device)


class AllocatedBytes:
    """What the caching allocator of each GPU of this process has given out.

    The limit binds what it has reserved, which is hardly more where its segments expand (distributed/cluster.py). It is
    a little below the GPU's: the run that follows takes the same memory in another order, and leaves other gaps. A
    block holds that little, and the GPU says when it is full: a limit that the allocator is told counts a block as a
    whole where part of it has memory already, and is told only for less than the GPU's.

    Args:
        fraction: of each GPU's memory that this process may use.
        limit: bytes of a smaller device to play, of which `fraction` may be used; None: the GPU's own.
    """

    def __init__(self, devices: list[torch.device], fraction: float = 1.0, limit: int | None = None) -> None:
        self.devices, self.limits = devices, {}
        self.kept_free: dict[torch.device, torch.Tensor] = {}
        for device in devices:
            free, total = torch.cuda.mem_get_info(device)
            there = free + torch.cuda.memory_reserved(device)
            allowed = min(int(fraction * min(limit or total, total)), there)
            kept = math.ceil(max(KEPT_FREE * allowed, 1) / SEGMENT) * SEGMENT
            if allowed < there:
                torch.cuda.set_per_process_memory_fraction((allowed - kept) / total, device)
            else:
                self.kept_free[device] = block_apart(kept, device)
            self.limits[str(device)] = allowed - kept

    def fresh(self) -> "AllocatedBytes":
        torch.cuda.empty_cache()
        return self

    @property
    def limit(self) -> int:
        return min(self.limits.values())

    def peaks(self) -> dict[str, int]:
        return self._without_kept(torch.cuda.max_memory_allocated)

    def held(self) -> dict[str, int]:
        return self._without_kept(torch.cuda.memory_allocated)

    def reserved(self) -> dict[str, int]:
        return self._without_kept(torch.cuda.max_memory_reserved)

    def _without_kept(self, measure: Callable[[torch.device], int]) -> dict[str, int]:
        kept = {device: block.nbytes for device, block in self.kept_free.items()}
        return {str(device): measure(device) - kept.get(device, 0) for device in self.devices}

    def reset(self) -> None:
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)

    def shares(self, bytes_of: dict[str, int]) -> dict[str, float]:
        return {name: value / self.limits[name] for name, value in bytes_of.items()}

    def __enter__(self) -> "AllocatedBytes":
        self.reset()
        return self

    def __exit__(self, *_: Any) -> None:
        gc.collect()
        torch.cuda.empty_cache()


class MemoryPhases(pl.Callback):
    """`shares`: the largest share of the limit in each phase, over all steps so far.

    `held` is what the last training step began with: weights, gradients where they stay, optimizer state.
    """

    def __init__(self, meter: TrackedBytes | AllocatedBytes) -> None:
        self.meter = meter
        self.shares: dict[str, float] = {}

    def _close(self, phase: str) -> None:
        for kind, peaks in ((phase, self.meter.peaks()), (RESERVED, self.meter.reserved())):
            for name, share in self.meter.shares(peaks).items():
                key = f"{kind} {name}".strip()
                self.shares[key] = max(self.shares.get(key, 0.0), share)
        self.meter.reset()

    def on_train_batch_start(self, *_: Any) -> None:
        self._close("between")
        self.shares[HELD] = max(self.meter.shares(self.meter.held()).values())

    def on_before_backward(self, *_: Any) -> None:
        self._close("forward")

    def on_after_backward(self, *_: Any) -> None:
        self._close("backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self._close("optimizer")

    def on_validation_batch_start(self, *_: Any) -> None:
        self._close("between")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._close("validation")


@contextmanager
def untracked(data: pl.LightningDataModule, tracker: TrackedBytes) -> Iterator[None]:
    """The data module's own arrays and transforms outside the tracker; the images that it hands on count."""
    transform = data.on_after_batch_transfer

    def outside(batch: Any, dataloader_idx: int) -> Any:
        with _disable_current_modes():
            images, labels = transform(batch, dataloader_idx)
        tracker.track_external(images, labels)
        return images, labels

    data.on_after_batch_transfer = outside  # type: ignore[method-assign]
    try:
        yield
    finally:
        data.on_after_batch_transfer = transform  # type: ignore[method-assign]
