"""DistributedDataParallel: every rank holds the whole model, gradients are averaged in buckets during backward.

trainer=ddp (GPUs), trainer=ddp_sim (the same in CPU processes over gloo).
"""

from datetime import timedelta

import torch
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lockstep.strategies.base import Capabilities, broadcast_buffers


class DDP(Capabilities, DDPStrategy):
    """Lightning's DDPStrategy over a process group that exists already, without collectives in evaluation's forwards.

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
            parallel_devices=parallel_devices, cluster_environment=cluster_environment, timeout=timeout,
            gradient_as_bucket_view=True,  # gradients are views of the buckets: no second copy
            broadcast_buffers=False, bucket_cap_mb=bucket_cap_mb, find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )  # fmt: skip

    @property
    def launcher(self) -> None:
        """The ranks are there already: Lightning starts none."""

    def determine_ddp_device_ids(self) -> None:
        """Return no device, as the batch is on this rank's already.

        Given one, Lightning builds DDP in a stream of its own, and torch warns in every run that gradients come in
        another one.
        """

    def on_validation_start(self) -> None:
        broadcast_buffers(self.lightning_module, self.root_device)

    on_test_start = on_validation_start
