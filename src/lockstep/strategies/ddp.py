"""DistributedDataParallel: every rank holds the whole model, gradients are averaged in buckets during backward.

trainer=ddp (GPUs), trainer=ddp_sim (the same in CPU processes over gloo).
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lockstep.strategies.capabilities import Capabilities
from lockstep.strategies.collectives import broadcast, let_go_of_what_was_sent


class DDP(Capabilities, DDPStrategy):
    """Lightning's DDPStrategy with our launch, and no collective in evaluation's forwards.

    Args:
        bucket_cap_mb: gradients travel in buckets of this size, each as soon as it is full.
        find_unused_parameters: costs a walk over the graph in every step; only for nets that skip layers.
        static_graph: the net does the same in every step; lets DDP reorder buckets and combine with checkpointing.
    """

    def __init__(
        self,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        timeout: timedelta = timedelta(seconds=300),
        bucket_cap_mb: float = 25.0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__(
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            timeout=timeout,
            gradient_as_bucket_view=True,  # gradients are views of the buckets: no second copy
            broadcast_buffers=False,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )
        self.bucket_cap_mb = bucket_cap_mb
        self.let_go = False

    @property
    def launcher(self) -> None:
        """The ranks are there already: Lightning starts none."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Lightning's sends pickles."""
        return broadcast(obj, src)

    def determine_ddp_device_ids(self) -> None:
        """The batch is on this rank's device already. Where it gets a device, Lightning builds DDP in a stream of
        its own, and torch warns in every run that gradients come in another one."""

    def optimizer_step(self, *args: Any, **named: Any) -> Any:
        """After the first step NCCL's group holds all gradients at once, beside the buckets that DDP then lays out."""
        result = super().optimizer_step(*args, **named)
        if not self.let_go and self.root_device.type == "cuda":
            let_go_of_what_was_sent(self.root_device)
        self.let_go = True
        return result

    def on_validation_start(self) -> None:
        broadcast_buffers(self.lightning_module, self.root_device)

    def on_test_start(self) -> None:
        broadcast_buffers(self.lightning_module, self.root_device)


def broadcast_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite each tensor by rank 0's, one at a time, through `device` where it lies elsewhere (NCCL needs a GPU)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for tensor in tensors:
        there = tensor.detach().to(device).contiguous()
        dist.broadcast(there, src=0)
        if there.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(there)


def move_all_but_net(module: nn.Module, device: torch.device) -> None:
    """What a LightningModule has beside its net, and its own `device`, for strategies that place the net themselves."""
    net, module.net = module.net, nn.Identity()
    module.to(device)
    module.net = net


def broadcast_buffers(module: nn.Module, device: torch.device) -> None:
    """Once before an evaluation, in place of DDP's broadcast in every forward.

    BatchNorm that is not synchronised holds other running statistics on each rank. Rank 0's go into the checkpoint,
    so all ranks evaluate with them.
    """
    broadcast_from_rank_zero(module.buffers(), device)
