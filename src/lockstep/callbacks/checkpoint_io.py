"""How Lightning writes and reads checkpoint files: whole or not at all, and read once for all ranks."""

import copy
import hashlib
import io
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lockstep.runs.errors import UserError
from lockstep.runs.files import Checksum, write_atomically
from lockstep.storage.load import Checkpoint, read_checkpoint

CHUNK_BYTES = 64 * 2**20


class CheckpointFiles(CheckpointIO):
    """Write a checkpoint beside its target and rename it; load it on rank 0 and broadcast it.

    Attributes:
        asynchronous: only copy the checkpoint to host memory, and leave it to the caller to call `write`.
        write: write the checkpoint that was saved last, unless that is done, and return its size and sha256.
    """

    def __init__(self) -> None:
        self.asynchronous = False
        self.write: Callable[[], Checksum] | None = None

    def save_checkpoint(self, checkpoint: Checkpoint, path: Any, storage_options: Any = None) -> None:
        if self.asynchronous:
            self.write = partial(write_checkpoint, on_host(checkpoint, always=True), Path(path))
        else:
            written = write_checkpoint(checkpoint, Path(path))
            self.write = lambda: written

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Checkpoint:
        return load_on_all_ranks(path, map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> Checksum:
    """Write beside the target, sync, rename; return the size and sha256 of what was written."""
    written: list[_Hashing] = []

    def write(file: Any) -> None:
        written.append(_Hashing(file))
        torch.save(on_host(checkpoint), written[0])

    write_atomically(path, write, binary=True)
    return Checksum(written[0].bytes, written[0].digest.hexdigest())


class _Hashing:
    """A file that hashes what is written to it; torch.save only appends."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def load_on_all_ranks(path: str | Path, map_location: Any = "cpu") -> Checkpoint:
    """Read a checkpoint on rank 0 and broadcast its bytes; other nodes need no copy of the file.

    Every rank must call it. Without a process group it is `read_checkpoint`.

    Raises:
        UserError: on every rank, as read_checkpoint.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read_checkpoint(path, map_location)
    is_rank_zero, content = dist.get_rank() == 0, io.BytesIO()
    file = open(path, "rb") if is_rank_zero and Path(path).is_file() else None  # noqa: SIM115 (closed below)
    sent: list[Any] = [file is not None or not is_rank_zero]
    dist.broadcast_object_list(sent)
    if not sent[0]:
        raise UserError(f"There is no checkpoint {path}.")
    while True:
        sent = [file.read(CHUNK_BYTES) if file else None]
        dist.broadcast_object_list(sent)
        if not sent[0]:
            break
        content.write(sent[0])
    if file:
        file.close()
    content.seek(0)
    return read_checkpoint(path, map_location, content)


# --- asynchronous writing


class Writer:
    """One thread that writes checkpoints one after the other while training goes on."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._jobs: deque[tuple[Future[None], Callable[[], None]]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def submit(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """Call `work` in the thread and, once it is done, `then` in `check`."""
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        self._jobs.append((self._thread.submit(work), then))

    def check(self, wait: bool = False) -> None:
        """Finish the jobs that are done, or all of them.

        Raises:
            Exception: what a job raised; the jobs behind it are dropped.
        """
        while self._jobs and (wait or self._jobs[0][0].done()):
            job, then = self._jobs.popleft()
            try:
                job.result()
            except BaseException:
                for later, _ in self._jobs:
                    later.cancel()
                self._jobs.clear()
                raise
            then()


def on_host(checkpoint: Checkpoint, always: bool = False) -> Checkpoint:
    """Return the checkpoint with all tensors in CPU memory; copies from a GPU are queued and waited for once.

    Tensors that share memory still do, so that a file holds tied weights once.

    Args:
        always: copy tensors that are in CPU memory too, because training goes on changing them.
    """
    copies: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and address of the memory
    moved = _queue_copies(checkpoint, copies, always)
    for device in {device for device, _ in copies if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _queue_copies(value: Any, copies: dict[tuple[torch.device, int], torch.Tensor], always: bool) -> Any:
    if isinstance(value, torch.Tensor) and (value.is_cuda or always):
        storage = value.untyped_storage()
        place = (value.device, storage.data_ptr())
        if place not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            # Pinned memory makes the copy from a GPU asynchronous; torch keeps it for the next checkpoint.
            own = torch.empty_like(whole, device="cpu", pin_memory=always and value.is_cuda)
            copies[place] = own.copy_(whole, non_blocking=True)
        host = torch.empty(0, dtype=value.dtype)
        return host.set_(copies[place].untyped_storage(), value.storage_offset(), value.size(), value.stride())
    if isinstance(value, dict):
        same = copy.copy(value)  # a state_dict carries the versions of its modules as an attribute
        same.update({key: _queue_copies(item, copies, always) for key, item in value.items()})
        return same
    if type(value) in (list, tuple):
        return type(value)(_queue_copies(item, copies, always) for item in value)
    return value
