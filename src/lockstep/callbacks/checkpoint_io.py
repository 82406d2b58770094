"""How Lightning writes and reads checkpoint files here: whole or not at all, and never unpickling code."""

import copy
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

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


def on_host(checkpoint: Checkpoint) -> Checkpoint:
    """The same with all tensors in CPU memory: the copies are queued, and waited for once.

    Tensors that share their memory still do, so that a file holds tied weights once.
    """
    copies: dict[tuple[torch.device, int], torch.Tensor] = {}
    moved = _queue_copies(checkpoint, copies)
    for device in {device for device, _ in copies}:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _queue_copies(value: Any, copies: dict[tuple[torch.device, int], torch.Tensor]) -> Any:
    """
    Args:
        copies: filled with the bytes of each memory, by device and address.
    """
    if isinstance(value, torch.Tensor) and value.is_cuda:
        storage = value.untyped_storage()
        place = (value.device, storage.data_ptr())
        if place not in copies:
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            copies[place] = whole.to("cpu", non_blocking=True)
        host = torch.empty(0, dtype=value.dtype)
        return host.set_(copies[place].untyped_storage(), value.storage_offset(), value.size(), value.stride())
    if isinstance(value, dict):
        same = copy.copy(value)  # a state_dict carries the versions of its modules as an attribute
        same.update({key: _queue_copies(item, copies) for key, item in value.items()})
        return same
    return type(value)(_queue_copies(item, copies) for item in value) if type(value) in (list, tuple) else value


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


class CheckpointFiles(CheckpointIO):
    """Remembers size and hash of the file it wrote last, for the small file beside it."""

    def __init__(self, read_folder: Callable[[Path], Checkpoint] | None = None) -> None:
        self.read_folder = read_folder
        self.written: dict[str, Measured] = {}

    def save_checkpoint(self, checkpoint: Checkpoint, path: Any, storage_options: Any = None) -> None:
        self.written = {os.fspath(path): write_checkpoint(checkpoint, Path(path))}

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Checkpoint:
        return read_checkpoint(path, map_location or "cpu", self.read_folder)

    def remove_checkpoint(self, path: Any) -> None:
        remove(Path(path))
