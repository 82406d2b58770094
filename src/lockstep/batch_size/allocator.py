"""Uses MemTracker's `_update_snap`: nothing public says when storages come and go.

What torch's caching allocator would reserve on a GPU for the tensors of steps on fake ones. This plays the allocator
with expandable segments (c10/cuda/CUDACachingAllocator.cpp): a stream has a range of addresses for small blocks and one
for large, which grow at their ends by whole pages and never shrink; a block goes into the smallest gap that takes it.
"""

import math
from collections import defaultdict
from itertools import pairwise
from typing import Any

import torch

from lockstep.batch_size.memory import SEGMENT, TrackedBytes

BLOCK = 512  # bytes; sizes are whole multiples of it
SMALL, SMALL_PAGE = 2**20, 2 * 2**20  # the largest small block; what the range of small ones grows by
ENDLESS = 2**62  # bytes of addresses
HOPPER = 9.0  # CUDA compute capability
THREADS = 108 * 2048  # that an A100 runs at once
MOST_THREADS, WARP = 512, 32  # of a block
PRODUCTS = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))
FEW_ROWS, MANY_ROWS = 16, 256  # of a thread: rows are spread over blocks from many on, down to few


class Range:
    """Addresses in blocks that are taken, gaps, and pages without memory; from `end` on there are only those.

    Args:
        page: bytes that it grows by.
    """

    def __init__(self, page: int) -> None:
        self.page, self.end = page, 0
        self.gaps: dict[int, int] = {}  # start → size
        self.taken: dict[int, int] = {}
        self.given_back: set[int] = set()  # starts of pages

    @property
    def reserved(self) -> int:
        return self.end - len(self.given_back) * self.page

    def take(self, size: int) -> int:
        """The start of a block of this size: in the smallest gap, in new pages where none has room."""
        fitting = sorted((gap, start) for start, gap in self.gaps.items() if gap >= size)
        could_grow_to = [gap + self._pages_at(start + gap) for gap, start in fitting]
        chosen = next((at for at, (one, other) in enumerate(pairwise(could_grow_to)) if other >= one), -1)
        start = fitting[chosen][1] if fitting else self._in_new_pages(size)
        gap = self.gaps.pop(start)
        if gap > size:
            self.gaps[start + size] = gap - size
        self.taken[start] = size
        return start

    def _pages_at(self, start: int) -> int:
        """Bytes without memory from there to the next gap or block."""
        at = start
        while at in self.given_back:
            at += self.page
        return ENDLESS if at == self.end else at - start

    def _in_new_pages(self, size: int) -> int:
        """The start of a gap that has room now: where the first page can be had again, else at the end."""
        for page in (*sorted(self.given_back), self.end):
            start = self._start_of_gap_before(page)
            if self._room(start, size) >= size:
                break
        at = start
        while at < start + size:
            if at not in self.gaps:
                self.end += self.page if at == self.end else 0
                self.given_back.discard(at)
                self.gaps[at] = self.page
            at += self.gaps.pop(at)
        self.gaps[start] = at - start + self.gaps.pop(at, 0)
        return start

    def _room(self, start: int, wanted: int) -> int:
        """Bytes from there to the next block, in gaps and pages; no further than is wanted."""
        at = start
        while at < start + wanted and (more := self.gaps.get(at) or self._pages_at(at)):
            at += more
        return at - start

    def _start_of_gap_before(self, end: int) -> int:
        return next((start for start, gap in self.gaps.items() if start + gap == end), end)

    def free(self, start: int) -> None:
        """The block there becomes a gap, one with the gaps beside it."""
        end = start + self.taken.pop(start)
        end += self.gaps.pop(end, 0)
        start = self._start_of_gap_before(start)
        self.gaps[start] = end - start

    def give_back(self) -> None:
        """Whole pages in gaps have no memory from now on."""
        for start, gap in list(self.gaps.items()):
            end = start + gap
            first, last = math.ceil(start / self.page) * self.page, end // self.page * self.page
            if first < last:
                del self.gaps[start]
                self.gaps |= {begin: size for begin, size in ((start, first - start), (last, end - last)) if size}
                self.given_back.update(range(first, last, self.page))


class Stream:
    """The two ranges of a CUDA stream."""

    def __init__(self) -> None:
        self.small, self.large = Range(SMALL_PAGE), Range(SEGMENT)

    def take(self, size: int) -> tuple[Range, int]:
        whole = math.ceil(size / BLOCK) * BLOCK
        there = self.small if whole <= SMALL else self.large
        return there, there.take(whole)

    def give_back(self) -> None:
        self.small.give_back()
        self.large.give_back()

    @property
    def reserved(self) -> int:
        return self.small.reserved + self.large.reserved


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
        workspace: bytes that cuBLAS holds for a thread from its first product on: that of forward, that of backward.
    """

    def __init__(self, workspace: int) -> None:
        super().__init__()
        self.workspace = workspace
        self.workspaces: dict[bool, torch.Tensor] = {}  # of the thread in which gradients are recorded or not
        self.streams: defaultdict[torch.cpu.Stream, Stream] = defaultdict(Stream)
        self.places: dict[Any, tuple[Range, int]] = {}  # of each storage that the tracker knows
        self.most = 0  # was reserved before something was given back

    def reserved(self) -> dict[str, int]:
        return {"": max(self.most, sum(stream.reserved for stream in self.streams.values()))}

    def give_back(self) -> None:
        """What torch.cuda.empty_cache does."""
        self.most = self.reserved()[""]
        for stream in self.streams.values():
            stream.give_back()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.sum.dim_IntList and result is not NotImplemented and list(args[1]) == [0]:
            rows, columns = args[0].shape[0], math.prod(args[0].shape[1:])
            if beside := column_sum_bytes(rows, columns):
                there, start = self.streams[torch.cpu.current_stream()].take(beside)
                there.free(start)
        if func in PRODUCTS and torch.is_grad_enabled() not in self.workspaces:
            own = self.workspaces[torch.is_grad_enabled()] = torch.empty(self.workspace, dtype=torch.uint8)
            self.track_external(own)
        return result

    def _update_snap(self, u_type: Any, winfo: Any, *args: Any, **kwargs: Any) -> None:
        """MemTracker says here which storage came, went, or has another size now."""
        super()._update_snap(u_type, winfo, *args, **kwargs)
        if u_type.name in ("DEL", "SIZE") and winfo in self.places:
            there, start = self.places.pop(winfo)
            there.free(start)
        if u_type.name in ("ADD", "SIZE") and winfo.mem_consumed and winfo.device.type != "meta":
            self.places[winfo] = self.streams[torch.cpu.current_stream()].take(winfo.mem_consumed)
