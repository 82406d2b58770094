"""64-bit hashes of tensors, computed on their device from their bits: a flipped bit always gives another hash.

A tensor is read as words of 8 bytes. Word i adds f(word) · w_i to the hash, modulo 2⁶⁴, where f is one-to-one and w_i
odd: a change within one word never goes unseen. Of a large tensor the words that lie COLUMNS apart are added up first,
in one pass at the speed of the memory: changes go unseen only where they cancel in each column.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

COLUMNS = 2**11
WORD = 8  # bytes


@torch.no_grad()
def hashes(tensors: Sequence[Tensor | None]) -> Tensor:
    """(n,) int64 on the device of the tensors, which is one; 0 of None. Of a sharded tensor this rank's part."""
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    columns, places, rests = [], [], []
    for place, tensor in enumerate(tensors):
        words = torch.empty(0, dtype=torch.int64, device=device) if tensor is None else _words(tensor)
        whole = words.numel() // COLUMNS * COLUMNS
        if whole:
            columns.append(words[:whole].view(-1, COLUMNS).sum(0))
            places.append(place)
        rests.append(words[whole:])
    found = _sums_of_parts(rests, device)
    if columns:
        found.index_add_(0, _index(tuple(places), device), _weighted(torch.stack(columns)).sum(1))
    return found


@torch.no_grad()
def hash_of_each(batch: Tensor) -> Tensor:
    """(B,) int64: of each row of a (B, …) tensor by itself, whatever its place in the batch."""
    rows = batch.contiguous().view(len(batch), -1)
    rest = -rows.shape[1] * rows.element_size() % WORD
    if rest:
        rows = torch.nn.functional.pad(rows.view(torch.uint8), (0, rest))
    words = _aligned(rows).view(torch.int64)
    whole = words.shape[1] // COLUMNS * COLUMNS
    if whole > COLUMNS:
        columns = words[:, :whole].view(len(words), -1, COLUMNS).sum(1)
        words = torch.cat([columns, words[:, whole:]], 1)
    return _weighted(words).sum(1)


def _words(tensor: Tensor) -> Tensor:
    """(n,) int64: the tensor's bytes in their logical order, the last ones filled up with zeros."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = _aligned(local.detach().contiguous().view(-1))
    rest = -flat.numel() * flat.element_size() % WORD
    if rest:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, rest))
    return flat.view(torch.int64)


def _aligned(values: Tensor) -> Tensor:
    """The same, beginning where a word may: a view into a larger tensor may not."""
    return values if values.storage_offset() * values.element_size() % WORD == 0 else values.clone()


def _sums_of_parts(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """(n,) int64: the weighted sum of each part, by one pass over all of them."""
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    sums = torch.cat([nothing, _weighted(torch.cat([nothing[:0], *parts])).cumsum(0)])
    ends = itertools.accumulate((part.numel() for part in parts), initial=0)
    return sums[_index(tuple(ends), device)].diff()


def _weighted(words: Tensor) -> Tensor:
    """(…, n) int64: f(word) · w_i. Without f the sign bits of two words would cancel: 2⁶³ · odd is always 2⁶³."""
    folded = words ^ ((words >> 33) & (2**31 - 1))
    return folded * _weights(words.shape[-1], words.device)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    """(count,) odd int64, the same on every machine: splitmix64's finaliser of 1, 2, …"""
    x = torch.arange(1, count + 1, dtype=torch.int64) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return ((x ^ ((x >> 31) & (2**33 - 1))) | 1).to(device)


@lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, as every step asks for the same ones: to fetch them would wait for the device."""
    return torch.tensor(places, device=device)
