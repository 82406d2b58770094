"""How Lightning writes and reads checkpoint files here: whole or not at all, and never unpickling code."""

import copy
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from torch.distributed.tensor import DTensor

from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.old_configs import today
from lockstep.storage.checkpoint_content import Checkpoint, checked_checkpoint, load_plain, refused
from lockstep.storage.checkpoint_files import Measured, remove


class _Hashing:
    """A file that hashes what is written to it; torch.save only ever appends."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def on_host(checkpoint: Checkpoint, always: bool = False) -> Checkpoint:
    """The same with all tensors in CPU memory: the copies are queued, and waited for once.

    Tensors that share their memory still do, so that a file holds tied weights once.

    Args:
        always: copy what lies there already too, into memory of its own: training goes on changing it.
    """
    copies: dict[tuple[torch.device, int], torch.Tensor] = {}
    moved = _queue_copies(checkpoint, copies, always)
    for device in {device for device, _ in copies if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _queue_copies(value: Any, copies: dict[tuple[torch.device, int], torch.Tensor], always: bool) -> Any:
    """
    Args:
        copies: filled with the bytes of each memory, by device and address.
    """
    if isinstance(value, DTensor) and always:
        copied = value.detach().to("cpu", copy=True, non_blocking=True)
        return copies.setdefault((value.device, id(value)), copied)
    if isinstance(value, torch.Tensor) and (value.is_cuda or always):
        storage = value.untyped_storage()
        place = (value.device, storage.data_ptr())
        if place not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            # From a GPU into pinned memory, which torch keeps for the next time.
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


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> Measured:
    """Write beside the target, sync, rename; returns size and hash of what was written."""
    written: list[_Hashing] = []

    def write(file: Any) -> None:
        written.append(_Hashing(file))
        torch.save(on_host(checkpoint), written[0])

    write_atomically(path, write, binary=True)
    return Measured(written[0].bytes, written[0].digest.hexdigest())


def read_checkpoint(
    path: str | Path, map_location: Any = "cpu", read_folder: Callable[[Path], Checkpoint] | None = None
) -> Checkpoint:
    """A checkpoint's tensors and plain values; nothing in the file chooses code to run.

    Args:
        read_folder: reads a folder of shards.

    Raises:
        UserError: there is no such file, or it is no checkpoint that can be loaded safely, whatever the damage.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"There is no checkpoint {path}.")
    with refused(path):
        of_shards = path.is_dir() and read_folder is not None
        checkpoint = checked_checkpoint(read_folder(path) if of_shards else load_plain(path, map_location))
    own = checkpoint.get("lockstep")
    if own and "config" in own:
        own["config"] = today(own["config"])
    return checkpoint


@dataclass(frozen=True)
class Deferred:
    """A checkpoint of which a copy waits to be written. group: of all ranks that write parts of it."""

    write: Callable[[], Measured | None]
    group: Any = None


class CheckpointFiles(CheckpointIO):
    """Remembers size and hash of the file it wrote last, for the small file beside it.

    Attributes:
        defers: keep a copy of what is to be saved, and leave it to `take_deferred` to write it.
    """

    def __init__(self, read_folder: Callable[[Path], Checkpoint] | None = None) -> None:
        self.read_folder = read_folder
        self.written: dict[str, Measured] = {}
        self.defers = False
        self._deferred: Deferred | None = None

    def save_checkpoint(self, checkpoint: Checkpoint, path: Any, storage_options: Any = None) -> None:
        if self.defers:
            self.defer(checkpoint, lambda copied: write_checkpoint(copied, Path(path)))
        else:
            self.written = {os.fspath(path): write_checkpoint(checkpoint, Path(path))}

    def defer(self, checkpoint: Checkpoint, write: Callable[[Checkpoint], Measured | None], group: Any = None) -> None:
        self._deferred = Deferred(partial(write, on_host(checkpoint, always=True)), group)

    def take_deferred(self) -> Deferred | None:
        taken, self._deferred = self._deferred, None
        return taken

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Checkpoint:
        return read_checkpoint(path, map_location or "cpu", self.read_folder)

    def remove_checkpoint(self, path: Any) -> None:
        remove(Path(path))
