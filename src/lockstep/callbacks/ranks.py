"""Exchange Python objects between ranks by torch's own collectives; without a process group there is one rank."""

from typing import Any

import torch.distributed as dist


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's value in rank order, on every rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def broadcast_object(value: Any, src: int = 0) -> Any:
    """Return rank `src`'s value on every rank."""
    values = [value]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(values, src)
    return values[0]
