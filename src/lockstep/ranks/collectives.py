"""Exchange objects and checkpoints between the ranks of a run."""

import contextlib
import io
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lockstep.checkpoints.load import Checkpoint, read_checkpoint
from lockstep.process.errors import UserError

CHUNK_BYTES = 64 * 2**20


def has_ranks() -> bool:
    """Return whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized()


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's value in rank order, on every rank."""
    if not has_ranks():
        return [value]

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def gather_for_checkpoint(value: Any, trainer: Any) -> list[Any]:
    """Return every rank's value as `gather_objects` does, or this rank's alone if fit has failed.

    After an exception a rank may save without the others (Lightning's OnExceptionCheckpoint), and
    would wait for them until the timeout.
    """
    if trainer is None or trainer.interrupted:
        return [value]
    return gather_objects(value)


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank of a process group."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def load_on_all_ranks(path: str | Path, map_location: Any = "cpu") -> Checkpoint:
    """Read a checkpoint on rank 0 and broadcast its bytes; every rank must call it.

    Raises:
        UserError: on every rank, if there is no such file or it cannot be loaded.
    """
    if not has_ranks():
        return read_checkpoint(path, map_location)

    file = Path(path)
    is_reader = dist.get_rank() == 0
    size = 0
    if is_reader and file.is_file():
        size = file.stat().st_size
    size = broadcast_object(size)
    if not size:
        raise UserError(f"There is no checkpoint {path}.")

    content = io.BytesIO()
    with file.open("rb") if is_reader else contextlib.nullcontext(content) as source:
        for _ in range(0, size, CHUNK_BYTES):
            content.write(broadcast_object(source.read(CHUNK_BYTES)))
    content.seek(0)
    return read_checkpoint(path, map_location, content)
