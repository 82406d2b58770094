"""Give every rank the tensors of rank 0: the initial weights, and BatchNorm's running statistics before evaluation."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def broadcast_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite each tensor by rank 0's, one at a time, through `device` where it lies elsewhere (NCCL needs a GPU)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in tensors:
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, src=0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(there)


def broadcast_buffers(module: nn.Module, device: torch.device) -> None:
    """Once before an evaluation, in place of DDP's broadcast in every forward.

    BatchNorm that is not synchronised holds other running statistics on each rank. Rank 0's go into the checkpoint,
    so all ranks evaluate with them.
    """
    broadcast_from_rank_zero(module.buffers(), device)
