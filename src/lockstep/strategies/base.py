"""The common parts of strategies: facts that the run asks for, the base of one process per device, broadcasts."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lockstep.runs.errors import UserError


class BFloat16Mixed(MixedPrecision):
    """Autocast in bfloat16; clips with a fused optimizer too, which Lightning refuses although nothing is scaled."""

    def __init__(self, device_type: str) -> None:
        super().__init__("bf16-mixed", device_type)

    clip_gradients = Precision.clip_gradients


class Capabilities:
    """Facts about a strategy; a base beside Lightning's class.

    Attributes:
        no_ema: why trainer.ema_decay cannot average the weights; empty if it can.
        supports_compile: trainer.compile can compile the net.
        scales_losses: fp16 works, whose losses are scaled.
        micro_batches: the number of parts in which a batch goes through the net.
        process_devices: the devices of one process if it computes on several; one may occur twice.
    """

    no_ema = ""
    supports_compile = True
    scales_losses = True
    micro_batches = 1
    process_devices: list[torch.device] = []

    @staticmethod
    def precision_for(precision: str, device_type: str) -> Precision | None:
        """Return a plugin for the Trainer in place of `precision=`; None if Lightning's own works."""
        return BFloat16Mixed(device_type) if precision == "bf16-mixed" else None


def capabilities(strategy: Any) -> Capabilities:
    """Return the facts about any strategy, Lightning's own too."""
    return strategy if isinstance(strategy, Capabilities) else Capabilities()


class Ranks(Capabilities, ParallelStrategy):
    """One process per device, over torch's default process group."""

    is_distributed = True  # self.log(sync_dist=True) asks for it
    num_nodes = 1  # Lightning sets it

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank]

    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_only.rank = self.global_rank
        if not dist.is_initialized():  # in a script of the user's own
            if not dist.is_torchelastic_launched():
                raise UserError(f"{type(self).__name__} needs ranks: start this script with torchrun.")
            dist.init_process_group("nccl" if self.root_device.type == "cuda" else "gloo")

    def barrier(self, name: str | None = None) -> None:
        dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        values = [obj]
        dist.broadcast_object_list(values, src)
        return values[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor in place, as Lightning does; return anything else as it is."""
        if not isinstance(tensor, Tensor):
            return tensor
        is_mean = reduce_op in ("mean", "avg")
        op = "SUM" if is_mean else str(reduce_op).rpartition(".")[2].upper()  # "sum", or torch's RedOpType.SUM
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group)
        return tensor.copy_(tensor / dist.get_world_size(group)) if is_mean else tensor

    def on_validation_start(self) -> None:
        broadcast_from_rank_zero(self.lightning_module.buffers(), self.root_device)

    on_test_start = on_validation_start


def broadcast_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite each tensor by rank 0's, one at a time, through `device` (NCCL needs a GPU).

    Strategies call it once before an evaluation for the buffers, in place of DDP's broadcast in every forward:
    BatchNorm that is not synchronised holds other running statistics on each rank, and checkpoints hold rank 0's.
    """
    if dist.is_initialized():
        for tensor in tensors:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.detach().copy_(sent)
