"""Exchange objects between the ranks of a run."""

from typing import Any

import torch.distributed as dist


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
