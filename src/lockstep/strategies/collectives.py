"""What strategies of one process per device share: their device, and collectives over ranks that have met."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_only


class Ranks(ParallelStrategy):
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
        dist.broadcast_object_list(box := [obj], src)
        return box[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """In place, as Lightning's; anything but a tensor comes back as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        mean = reduce_op in ("mean", "avg")
        op = dist.ReduceOp.SUM if mean else reduce_op
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op.upper()) if isinstance(op, str) else op, group)
        return tensor.copy_(tensor / dist.get_world_size(group)) if mean else tensor
