"""Fully sharded data parallelism (FSDP2): each rank keeps 1/N of weights, gradients and optimizer state.

trainer=fsdp (GPUs), trainer=fsdp_sim (the same code in CPU processes over gloo). The weights of a block are gathered
just before it computes, and freed after it. See https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import ClusterEnvironment
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from lockstep.runs.errors import UserError
from lockstep.strategies.base import Ranks, broadcast_from_rank_zero, move_all_but_net
from lockstep.strategies.precision import ShardedPrecision, policies, precision_for
from lockstep.strategies.sharded_state import (
    State,
    full_optimizer_state,
    full_state_dict,
    sharded_optimizer_state,
    sharded_state_dict,
)
from lockstep.strategies.sync_batchnorm import BATCH_NORMS

log = logging.getLogger(__name__)


class Sharded(Ranks):
    """fully_shard over the net's `shard_units()`, then over the net itself.

    Args:
        shard_within_node: shard over the ranks of a node and replicate over nodes (HSDP): the gathers stay inside a
            node, which pays off where the network between nodes is slow and the model fits one node.
        cpu_offload: keep shards and optimizer state in CPU memory, and step there: slow, for what fits no other way.
        reshard_after_forward: free a unit's weights between forward and backward; false trades memory for time.
    """

    no_ema = "the average would be a second net in shards, which every validation and checkpoint would gather"

    def __init__(
        self,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        shard_within_node: bool = False,
        cpu_offload: bool = False,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__(parallel_devices, cluster_environment)
        self.shard_within_node, self.cpu_offload = shard_within_node, cpu_offload
        self.reshard_after_forward = reshard_after_forward

    precision_for = staticmethod(precision_for)  # Lightning refuses fp16 here

    def setup_environment(self) -> None:
        super().setup_environment()
        per_node = len(self.parallel_devices)
        shape = (self.world_size // per_node, per_node) if self.shard_within_node else (self.world_size,)
        names = ("replicate", "shard")[-len(shape) :]
        self.device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    def setup(self, trainer) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = self.precision_plugin.convert_module(module)
        if not isinstance(module.net, FSDPModule):
            self._shard(module.net)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        move_all_but_net(self.lightning_module, self.root_device)  # offloaded shards stay in CPU memory

    def teardown(self) -> None:
        """Lightning's would move the shards to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def _shard(self, net: nn.Module) -> None:
        units: list[nn.Module] = getattr(net, "shard_units", list)()
        if not units and self.global_rank == 0:
            log.info("The model names no shard_units(): FSDP gathers it as a whole, which saves little memory.")
        check_shardable(net)
        broadcast_from_rank_zero([*net.parameters(), *net.buffers()], self.root_device)
        for parameter in net.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard refuses channels_last weights
        block, root, norm = policies(self.precision_plugin)
        offload = CPUOffloadPolicy() if self.cpu_offload and self.root_device.type != "cpu" else OffloadPolicy()
        shard = partial(
            fully_shard, mesh=self.device_mesh, offload_policy=offload, reshard_after_forward=self.reshard_after_forward
        )
        if isinstance(self.precision_plugin, ShardedPrecision):
            for layer in [layer for layer in net.modules() if isinstance(layer, BATCH_NORMS)]:
                shard(layer, mp_policy=norm)
        for unit in units:
            shard(unit, mp_policy=block)
        shard(net, mp_policy=root)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Around the micro-batches of an accumulated step but the last: gradients add up unsharded, unreduced."""
        net = self.lightning_module.net
        net.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            net.set_requires_gradient_sync(True)

    # --- checkpoints: whole on rank 0, so that any strategy and world size reads them

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> State:
        """Return the full state dict on rank 0 and an empty one elsewhere; every rank must call it."""
        return full_state_dict(self.lightning_module.state_dict(), keep=self.is_global_zero)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        """Return the full optimizer state on rank 0; every rank must call it."""
        state = (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        return full_optimizer_state(state, keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        module.load_state_dict(sharded_state_dict(checkpoint["state_dict"], module.state_dict()), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(sharded_optimizer_state(state, optimizer))


def check_shardable(net: nn.Module) -> None:
    scalars = [name for name, parameter in net.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UserError(f"The parameter {scalars[0]} is a scalar, which FSDP cannot shard: trainer=ddp works.")
