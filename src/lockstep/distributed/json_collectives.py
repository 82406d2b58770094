"""What ranks tell each other beside tensors: JSON, whose reader can build nothing but plain values.

torch's own collectives of objects send pickles, which run code where they are read. All ranks call these together.
"""

import json
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from lockstep.runs.typed_json import Part, WrongValue, from_json

LARGEST_BYTES = 64 * 2**20  # of one rank
P = TypeVar("P", bound=Part)


@overload
def gather_json(value: Any, *, group: Any = None) -> list[Any]: ...
@overload
def gather_json(value: Any, kind: type[P]) -> list[P]: ...
def gather_json(value: Any, kind: Any = None, *, group: Any = None) -> list[Any]:
    """Every rank's value, in rank order; only this one's where there is no process group.

    Args:
        value: what JSON has a form for; tuples come as lists.
        kind: what each must be, where its fields decide anything.
        group: another than the default, of all ranks: for a thread beside the training.
    Raises:
        TypeError: JSON has no form for the value.
        RuntimeError: a rank sent something else, or too much.
    """
    mine = _encoded(value)
    if not _has_others():
        return [_decoded(mine, 0, kind)]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]), group=group)
    lengths = [_checked_size(int(size), rank) for rank, size in enumerate(sizes)]
    everyone = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths]
    own = torch.zeros(max(lengths), dtype=torch.uint8)
    own[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    dist.all_gather(everyone, own, group=group)
    return [_decoded(data[:length].numpy().tobytes(), rank, kind)
            for rank, (data, length) in enumerate(zip(everyone, lengths, strict=True))]  # fmt: skip


def broadcast_json(value: Any, src: int = 0) -> Any:
    """Rank `src`'s value on every rank; errors as gather_json's."""
    if not _has_others():
        return _decoded(_encoded(value), src, None)
    mine = _encoded(value) if dist.get_rank() == src else b""
    size = torch.tensor([len(mine)])
    dist.broadcast(size, src=src)
    length = _checked_size(int(size), src)
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(length, dtype=torch.uint8)
    dist.broadcast(data, src=src)
    return _decoded(data.numpy().tobytes(), src, None)


def _has_others() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _checked_size(size: int, rank: int) -> int:
    if not 0 < size <= LARGEST_BYTES:
        raise RuntimeError(f"rank {rank} sends {size} bytes where 1 to {LARGEST_BYTES} are taken")
    return size


def _decoded(data: bytes, rank: int, kind: type[Part] | None) -> Any:
    try:
        value = json.loads(data)
        return value if kind is None else from_json(kind, value)
    except (ValueError, RecursionError, WrongValue) as error:
        raise RuntimeError(f"rank {rank} sent no JSON of the form that was asked for ({error})") from None
