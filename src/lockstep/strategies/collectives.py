"""What strategies of one process per device share: their device, and collectives over ranks that have met."""

import time
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only

from lockstep.strategies.capabilities import Capabilities

SEEN_S = 0.3  # NCCL's watchdog looks every 0.1 s


def broadcast(obj: Any, src: int = 0) -> Any:
    """Return rank `src`'s object on every rank."""
    values = [obj]
    dist.broadcast_object_list(values, src)
    return values[0]


def let_go_of_what_was_sent(device: torch.device) -> None:
    """NCCL's group holds the tensors that it sent until the next collective after its watchdog saw that they arrived.

    All ranks call it; it sends a number of its own.
    """
    torch.cuda.synchronize(device)
    time.sleep(SEEN_S)
    dist.all_reduce(torch.zeros((), device=device))


class Ranks(Capabilities, ParallelStrategy):
    """Needs torch's default process group, which distributed/process_group.py makes."""

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
        return broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """In place, as Lightning's; anything but a tensor comes back as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        mean = reduce_op in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else reduce_op
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op, group)
        return tensor.copy_(tensor / dist.get_world_size(group)) if mean else tensor
