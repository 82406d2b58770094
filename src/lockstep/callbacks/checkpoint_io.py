"""Write checkpoint files atomically, and read them once for all ranks."""

import contextlib
import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection

from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.storage.load import Checkpoint, read_checkpoint

CHUNK_BYTES = 64 * 2**20


class CheckpointFiles(CheckpointIO):
    """Write a checkpoint beside its target and rename it; load it on rank 0 and broadcast it."""

    write: Callable[[Checkpoint, Path], object] | None = None  # on rank 0, in place of writing a file

    def save_checkpoint(self, checkpoint: Checkpoint, path: Any, storage_options: Any = None) -> None:
        (self.write or write_checkpoint)(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Checkpoint:
        return load_on_all_ranks(path, map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def check_loadable(checkpoint: Checkpoint) -> None:
    """Raise UserError before the first checkpoint is written if a resume could not read what a module adds to it."""
    file = io.BytesIO()
    torch.save(apply_to_collection(checkpoint, torch.Tensor, lambda _: torch.empty(0)), file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        what = re.search(r"GLOBAL (\S+)", str(error))
        raise UserError(
            f"on_save_checkpoint adds {what[1] if what else 'an object'}, which is not loaded from files (it could run "
            "code): store numbers, texts, tensors, lists and dicts."
        ) from None


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write beside the target, sync, rename."""
    write_atomically(path, lambda file: torch.save(checkpoint, file), binary=True)


def load_on_all_ranks(path: str | Path, map_location: Any = "cpu") -> Checkpoint:
    """Read a checkpoint on rank 0 and broadcast its bytes; every rank calls it, and raises as `read_checkpoint`."""
    if not dist.is_initialized():
        return read_checkpoint(path, map_location)
    file, is_reader = Path(path), dist.get_rank() == 0
    size, content = broadcast_object(file.stat().st_size if is_reader and file.is_file() else 0), io.BytesIO()
    if not size:
        raise UserError(f"There is no checkpoint {path}.")
    with file.open("rb") if is_reader else contextlib.nullcontext(content) as source:
        for _ in range(0, size, CHUNK_BYTES):
            content.write(broadcast_object(source.read(CHUNK_BYTES)))
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


def on_host(checkpoint: Any, always: bool = False) -> Any:
    """Return a checkpoint with all tensors in CPU memory; copies from a GPU are queued and waited for once.

    Tied weights stay one tensor, so that a file holds them once. `always` also copies tensors that are in CPU memory,
    because training goes on changing them.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    # Pinned memory makes a copy from a GPU asynchronous, but torch keeps it for the next checkpoint.
    left_to_pin = psutil.virtual_memory().available // 4 if always else 0

    def moved(value: Any) -> Any:
        nonlocal left_to_pin
        if isinstance(value, dict):
            same = copy.copy(value)  # of its own class, such as Counter
            same.update({key: moved(item) for key, item in value.items()})
            return same
        if type(value) in (list, tuple):
            return type(value)(map(moved, value))
        if not isinstance(value, torch.Tensor) or not (value.is_cuda or always):
            return value
        key = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if key not in copies:
            pin = value.is_cuda and value.nbytes <= left_to_pin
            left_to_pin -= value.nbytes * pin
            host = torch.empty_like(value, device="cpu", pin_memory=pin)
            copies[key] = host.copy_(value.detach(), non_blocking=True)
        return copies[key]

    found = moved(checkpoint)
    for device in {key[0] for key in copies if key[0].type == "cuda"}:
        torch.cuda.current_stream(device).synchronize()
    return found
