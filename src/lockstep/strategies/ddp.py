"""DistributedDataParallel: every rank holds the whole model, gradients are averaged in buckets during backward.

trainer=ddp (GPUs), trainer=ddp_sim (the same in CPU processes over gloo).
"""

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lockstep.strategies.base import Capabilities, broadcast_from_rank_zero


class DDP(Capabilities, DDPStrategy):
    """Lightning's DDPStrategy over a process group that exists already, without collectives in evaluation's forwards.

    Args:
        bucket_cap_mb: gradients travel in buckets of this size, each as soon as it is full.
        find_unused_parameters: costs a walk over the graph in every step; only for nets that skip layers.
        static_graph: the net does the same in every step; DDP can reorder buckets and combine with checkpointing.
    """

    def __init__(
        self, *, bucket_cap_mb: float = 25.0, find_unused_parameters: bool = False, static_graph: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            gradient_as_bucket_view=True,  # gradients are views of the buckets: no second copy
            broadcast_buffers=False, bucket_cap_mb=bucket_cap_mb, find_unused_parameters=find_unused_parameters,
            static_graph=static_graph, **options,
        )  # fmt: skip

    @property
    def launcher(self) -> None:
        """Lightning starts no ranks, because they exist already."""

    def determine_ddp_device_ids(self) -> None:
        """Return no device. With one, Lightning builds DDP in a stream of its own, and torch warns in every run."""

    def on_validation_start(self) -> None:
        broadcast_from_rank_zero(self.lightning_module.buffers(), self.root_device)

    on_test_start = on_validation_start
