"""Write and read checkpoint files for Lightning: whole or not at all, and read once for all ranks.

Objects between ranks go through torch's own collectives; without a process group there is one rank.
"""

import copy
import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lockstep.runs.errors import UserError
from lockstep.runs.files import Checksum, checksum_of, write_atomically
from lockstep.storage.load import Checkpoint, read_checkpoint

CHUNK_BYTES = 64 * 2**20


class CheckpointFiles(CheckpointIO):
    """Write a checkpoint beside its target and rename it; load it on rank 0 and broadcast it.

    Attributes:
        keeps: only keep the next checkpoint as `content`, for the callback that writes it.
    """

    def __init__(self) -> None:
        self.keeps, self.content = False, None

    def save_checkpoint(self, checkpoint: Checkpoint, path: Any, storage_options: Any = None) -> None:
        if self.keeps:
            self.content = checkpoint
        else:
            write_checkpoint(on_host(checkpoint), Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Checkpoint:
        return load_on_all_ranks(path, map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> Checksum:
    """Write beside the target, sync, rename; return the size and sha256 of the file."""
    write_atomically(path, lambda file: torch.save(checkpoint, file), binary=True)
    return checksum_of(path)


def load_on_all_ranks(path: str | Path, map_location: Any = "cpu") -> Checkpoint:
    """Read a checkpoint on rank 0 and broadcast its bytes; other nodes need no copy of the file.

    Every rank must call it. Without a process group it is `read_checkpoint`.

    Raises:
        UserError: on every rank, as read_checkpoint.
    """
    if not dist.is_initialized():
        return read_checkpoint(path, map_location)
    data = Path(path).read_bytes() if dist.get_rank() == 0 and Path(path).is_file() else b""
    size, content = broadcast_object(len(data)), io.BytesIO(data)
    if not size:
        raise UserError(f"There is no checkpoint {path}.")
    for start in range(0, size, CHUNK_BYTES):
        chunk = broadcast_object(data[start : start + CHUNK_BYTES])
        if not data:
            content.write(chunk)
    content.seek(0)
    return read_checkpoint(path, map_location, content)


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's value in rank order, on every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank of a process group."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def on_host(checkpoint: Checkpoint, always: bool = False) -> Checkpoint:
    """Return the checkpoint with all tensors in CPU memory; copies from a GPU are queued and waited for once.

    Tensors that share memory still do, so that a file holds tied weights once.

    Args:
        always: copy tensors that are in CPU memory too, because training goes on changing them.
    """
    copies: dict[tuple[torch.device, int], torch.Tensor] = {}  # by device and address of the memory

    def moved(value: Any) -> Any:
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
            same.update({key: moved(item) for key, item in value.items()})
            return same
        return type(value)(map(moved, value)) if type(value) in (list, tuple) else value

    found = moved(checkpoint)
    for device in {device for device, _ in copies if device.type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return found
