"""What strategies share: answers to what a strategy can do, the base of one process per device, moving tensors."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import ClusterEnvironment, Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lockstep.strategies.precision import BFloat16Mixed


class Capabilities:
    """What the run asks of a strategy; a base beside Lightning's class.

    Attributes:
        no_ema: why trainer.ema_decay cannot average the weights; empty where it can.
        supports_compile: trainer.compile can compile the net.
        scales_losses: fp16 works, whose losses are scaled.
        micro_batches: parts in which it sends a batch through the net.
        process_devices: the devices of one process where it computes on several; one may come twice.
    """

    no_ema = ""
    supports_compile = True
    scales_losses = True
    micro_batches = 1
    process_devices: list[torch.device] = []

    @staticmethod
    def precision_for(precision: str, device_type: str) -> Precision | None:
        """Return a plugin for the Trainer in place of `precision=`; None where Lightning's own does."""
        return BFloat16Mixed(device_type) if precision == "bf16-mixed" else None


def capabilities(strategy: Any) -> Capabilities:
    """Return the answers of any strategy, Lightning's own too."""
    return strategy if isinstance(strategy, Capabilities) else Capabilities()


class Ranks(Capabilities, ParallelStrategy):
    """One process per device, over torch's default process group, which exists already."""

    is_distributed = True  # self.log(sync_dist=True) asks for it
    num_nodes = 1  # Lightning sets it, where it is there

    def __init__(
        self,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
    ) -> None:
        super().__init__(parallel_devices=parallel_devices, cluster_environment=cluster_environment)

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank]

    def setup_environment(self) -> None:
        super().setup_environment()
        rank_zero_only.rank = self.global_rank

    def barrier(self, name: str | None = None) -> None:
        dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        values = [obj]
        dist.broadcast_object_list(values, src)
        return values[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce in place, as Lightning's; anything but a tensor comes back as it is."""
        if not isinstance(tensor, Tensor):
            return tensor
        mean = reduce_op in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else reduce_op
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op, group)
        return tensor.copy_(tensor / dist.get_world_size(group)) if mean else tensor

    def on_validation_start(self) -> None:
        broadcast_buffers(self.lightning_module, self.root_device)

    on_test_start = on_validation_start


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
    """Give all ranks rank 0's buffers once before an evaluation, in place of DDP's broadcast in every forward.

    BatchNorm that is not synchronised holds other running statistics on each rank. Rank 0's go into the checkpoint.
    """
    broadcast_from_rank_zero(module.buffers(), device)


def move_all_but_net(module: nn.Module, device: torch.device) -> None:
    """Move a LightningModule without its net, and its own `device`, for strategies that place the net themselves."""
    net, module.net = module.net, nn.Identity()
    module.to(device)
    module.net = net
