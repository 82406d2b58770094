"""Data parallelism by hand, to read before DDP (trainer=allreduce, trainer=allreduce_sim).

Every rank holds the whole model and sees its part of the global batch. Three things make N ranks one: equal weights
at the start; after backward every gradient summed over the ranks; and divided by their number.
DDP does the same in buckets while backward still runs: faster, and harder to see.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.strategies import ParallelStrategy

from lockstep.strategies.capabilities import Capabilities
from lockstep.strategies.ddp import broadcast_buffers, broadcast_from_rank_zero


class AllReduce(Capabilities, ParallelStrategy):
    is_distributed = True  # self.log(sync_dist=True) asks for it
    last_micro_batch, num_nodes = True, 1  # Lightning sets the second, where it is there

    def __init__(
        self,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        timeout: timedelta = timedelta(seconds=300),
    ) -> None:
        super().__init__(parallel_devices=parallel_devices, cluster_environment=cluster_environment)
        self.timeout = timeout

    @property
    def root_device(self) -> torch.device:
        return self.parallel_devices[self.local_rank]

    def setup_environment(self) -> None:
        super().setup_environment()
        gpu = self.root_device if self.root_device.type == "cuda" else None
        _init_dist_connection(self.cluster_environment, "nccl" if gpu else "gloo", timeout=self.timeout, device_id=gpu)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._layer_sync:  # SyncBatchNorm, where trainer.sync_batchnorm asks for it
            model = self._layer_sync.apply(model)
        broadcast_from_rank_zero([*model.parameters(), *model.buffers()], self.root_device)
        return model

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning runs all micro-batches of an accumulated step but the last in here: gradients only add up."""
        self.last_micro_batch = False
        yield
        self.last_micro_batch = True

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        if self.last_micro_batch:  # the mean over ranks of equal batches is the gradient of the global batch
            for parameter in (p for p in self.model.parameters() if p.grad is not None):
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world_size

    def on_validation_start(self) -> None:
        broadcast_buffers(self.model, self.root_device)

    on_test_start = on_validation_start

    def barrier(self, name: str | None = None) -> None:
        dist.barrier()

    def broadcast(self, obj, src: int = 0):
        dist.broadcast_object_list(box := [obj], src)
        return box[0]

    def reduce(self, tensor, group=None, reduce_op="mean"):
        return _sync_ddp_if_available(tensor, group, reduce_op) if isinstance(tensor, torch.Tensor) else tensor
