"""Uses MemTracker's `_update_snap`: nothing public says when storages come and go.

What torch's caching allocator would reserve on a GPU for the tensors of steps on fake ones. This plays the allocator
with expandable segments (c10/cuda/CUDACachingAllocator.cpp): a stream has a range of addresses for small blocks and one
for large, which grow at their ends by whole pages and never shrink; a block goes into the smallest gap that takes it.
"""

import math
from collections import defaultdict
from typing import Any

import torch

from lockstep.batch_size.memory import SEGMENT, TrackedBytes

BLOCK = 512  # bytes; sizes are whole multiples of it
SMALL, SMALL_PAGE = 2**20, 2 * 2**20  # the largest small block; what the range of small ones grows by
HOPPER = 9.0  # CUDA compute capability
THREADS = 108 * 2048  # that an A100 runs at once
MOST_THREADS, WARP = 512, 32  # of a block
FEW_ROWS, MANY_ROWS = 16, 256  # of a thread: rows are spread over blocks from many on, down to few


class Range:
    """Addresses from 0 to `end`, in blocks that are taken and gaps.

    Args:
        page: bytes that it grows by.
    """

    def __init__(self, page: int) -> None:
        self.page, self.end = page, 0
        self.gaps: dict[int, int] = {}  # start → size
        self.taken: dict[int, int] = {}

    def take(self, size: int) -> int:
        """The start of a block of this size: in the smallest gap, at the end where none has room."""
        fitting = [(gap, start) for start, gap in self.gaps.items() if gap >= size and start + gap != self.end]
        start = min(fitting)[1] if fitting else self._at_end(size)
        gap = self.gaps.pop(start)
        if gap > size:
            self.gaps[start + size] = gap - size
        self.taken[start] = size
        return start

    def _at_end(self, size: int) -> int:
        """The start of the last gap, which has room now."""
        start = next((start for start, gap in self.gaps.items() if start + gap == self.end), self.end)
        self.end = max(self.end, math.ceil((start + size) / self.page) * self.page)
        self.gaps[start] = self.end - start
        return start

    def free(self, start: int) -> None:
        """The block there becomes a gap, one with the gaps beside it."""
        end = start + self.taken.pop(start)
        end += self.gaps.pop(end, 0)
        before = next((first for first, gap in self.gaps.items() if first + gap == start), None)
        if before is not None:
            del self.gaps[before]
            start = before
        self.gaps[start] = end - start


class Stream:
    """The two ranges of a CUDA stream."""

    def __init__(self) -> None:
        self.small, self.large = Range(SMALL_PAGE), Range(SEGMENT)

    def take(self, size: int) -> tuple[Range, int]:
        whole = math.ceil(size / BLOCK) * BLOCK
        there = self.small if whole <= SMALL else self.large
        return there, there.take(whole)

    @property
    def reserved(self) -> int:
        return self.small.end + self.large.end


def workspace_bytes(capability: float) -> int:
    """What torch lets cuBLAS have in each thread that multiplies (aten/src/ATen/cuda/CublasHandlePool.cpp)."""
    return 32 * 2**20 if capability >= HOPPER else 8 * 2**20 + 128 * 2**10


def column_sum_bytes(rows: int, columns: int) -> int:
    """What the kernel that sums float32 or shorter columns takes while it runs, as for the gradient of a bias.

    Blocks of 32 × 4 threads sum parts of the rows, and their sums lie in memory (aten/src/ATen/native/cuda/Reduce.cuh).
    """
    vector = 4 if columns % 4 == 0 else 1
    threads = MOST_THREADS // vector
    width = min(2 ** int(math.log2(max(columns // vector, 1))), WARP)
    height = min(2 ** int(math.log2(max(rows, 1))), threads // width)
    rows_of_thread = math.ceil(rows / height)
    blocks = math.ceil(columns / vector / width)
    if rows_of_thread < MANY_ROWS or blocks > THREADS // (width * height):
        return 0  # each block sums whole columns
    parts = min(math.ceil(THREADS // (width * height) / blocks), math.ceil(rows_of_thread / FEW_ROWS))
    return 4 * columns * max(parts, math.ceil(rows_of_thread / MANY_ROWS)) * width * vector


class PlayedAllocator(TrackedBytes):
    """Tracks the bytes of all tensors, and plays where a GPU's allocator would put them.

    Memory of one stream is given to no other: FSDP, which gathers and reduces in streams of its own, uses torch.cpu's
    for tensors on the CPU, which do nothing but say which of them it is in.

    Args:
        workspace: bytes that cuBLAS holds for the thread of forward, and as many for that of backward.
    """

    def __init__(self, workspace: int) -> None:
        super().__init__()
        self.workspaces = 2 * workspace
        self.streams: defaultdict[torch.cpu.Stream, Stream] = defaultdict(Stream)
        self.places: dict[Any, tuple[Range, int]] = {}  # of each storage that the tracker knows
        for _ in range(2):
            self.streams[torch.cpu.current_stream()].take(workspace)

    def now(self) -> int:
        return super().now() + self.workspaces

    def peaks(self) -> dict[str, int]:
        return {name: peak + self.workspaces for name, peak in super().peaks().items()}

    def reserved(self) -> dict[str, int]:
        return {"": sum(stream.reserved for stream in self.streams.values())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.sum.dim_IntList and result is not NotImplemented and list(args[1]) == [0]:
            rows, columns = args[0].shape[0], math.prod(args[0].shape[1:])
            if beside := column_sum_bytes(rows, columns):
                there, start = self.streams[torch.cpu.current_stream()].take(beside)
                there.free(start)
        return result

    def _update_snap(self, u_type: Any, winfo: Any, *args: Any, **kwargs: Any) -> None:
        """MemTracker says here which storage came, went, or has another size now."""
        super()._update_snap(u_type, winfo, *args, **kwargs)
        if u_type.name in ("DEL", "SIZE") and winfo in self.places:
            there, start = self.places.pop(winfo)
            there.free(start)
        if u_type.name in ("ADD", "SIZE") and winfo.mem_consumed:
            self.places[winfo] = self.streams[torch.cpu.current_stream()].take(winfo.mem_consumed)
