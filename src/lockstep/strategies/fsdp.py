"""Fully sharded data parallelism (FSDP2): each rank keeps 1/N of weights, gradients and optimizer state.

trainer=fsdp (GPUs), trainer=fsdp_sim (the same code in CPU processes over gloo). The weights of a block are gathered
just before it computes, and freed after it. See https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lockstep.runs.errors import UserError
from lockstep.strategies.base import Ranks, SixteenBits, broadcast_from_rank_zero
from lockstep.strategies.sync_batchnorm import BATCH_NORMS

log = logging.getLogger(__name__)

State = dict[str, Any]
LOW_PRECISION = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedPrecision(SixteenBits):
    """Train in bf16, or fp16 with loss scaling: shards and reduced gradients are float32, gathered weights 16 bits."""

    __qualname__ = "MixedPrecision"  # names its state in checkpoints: either resumes from DDP's

    def forward_context(self) -> Any:
        """No autocast: fully_shard casts weights and inputs."""
        return nullcontext()


class FSDP(Ranks):
    """Shard each network of the LightningModule by fully_shard: its `shard_units()`, then itself.

    Args:
        shard_within_node: shard over the ranks of a node and replicate over nodes (HSDP): the gathers stay inside a
            node, which pays off if the network between nodes is slow and the model fits one node.
        reshard_after_forward: free a unit's weights between forward and backward; false trades memory for time.
    """

    no_ema = "averaged weights would be a second sharded network, gathered in every validation and checkpoint"
    compiles_units = True

    def __init__(self, shard_within_node: bool = False, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self.shard_within_node, self.reshard_after_forward = shard_within_node, reshard_after_forward

    @staticmethod
    def precision_for(precision: str, device_type: str) -> Precision | None:
        return ShardedPrecision(precision, device_type) if precision in LOW_PRECISION else None

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
        networks = networks_of(module)
        if not any(hasattr(net, "shard_units") for net in networks) and self.global_rank == 0:
            log.info("The model does not define shard_units(): FSDP gathers all its weights at once and saves little.")
        for net in networks:
            if not isinstance(net, FSDPModule):
                self._shard(net)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        self.lightning_module.to(self.root_device)  # what is sharded lies there already

    def teardown(self) -> None:
        """Tear down without Lightning's move of the shards to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def _shard(self, net: nn.Module) -> None:
        broadcast_from_rank_zero([*net.parameters(), *net.buffers()], self.root_device)
        for parameter in net.parameters():
            parameter.data = parameter.data.contiguous()  # fully_shard refuses channels_last weights
        block = root = MixedPrecisionPolicy()
        shard = partial(fully_shard, mesh=self.device_mesh, reshard_after_forward=self.reshard_after_forward)
        if isinstance(self.precision_plugin, ShardedPrecision):
            dtype, full = LOW_PRECISION[self.precision_plugin.precision], torch.float32
            block = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=full)
            root = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=full, output_dtype=full)  # logits in float32
            for layer in [layer for layer in net.modules() if isinstance(layer, BATCH_NORMS)]:  # statistics in float32
                shard(layer, mp_policy=MixedPrecisionPolicy(full, full, output_dtype=dtype))
        for unit in getattr(net, "shard_units", list)():
            shard(unit, mp_policy=block)
        shard(net, mp_policy=root)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip gradient reduction; Lightning uses this for all but the last micro-batch of an accumulated step."""
        networks = networks_of(self.lightning_module)
        for net in networks:
            net.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for net in networks:
                net.set_requires_gradient_sync(True)

    # --- checkpoints hold whole tensors: any strategy and world size can load them; every rank calls, rank 0 saves.
    # torch's get_optimizer_state_dict is not used because it runs an optimizer step if the state is empty.

    restore_checkpoint_after_setup = True

    def lightning_module_state_dict(self) -> State:
        return self._whole(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> State:
        state = (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()
        return {**state, "state": self._whole(state["state"])}

    def _whole(self, state: Mapping[Any, Any]) -> State:
        whole: State = gathered(state, self.is_global_zero)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # copies from a GPU are only queued
        return whole if self.is_global_zero else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        own = self.lightning_module.state_dict()
        state = {name: sharded_like(value, own.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
            states = {
                number: {name: sharded_like(value, parameters.get(number)) for name, value in values.items()}
                for number, values in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": states})


def networks_of(module: nn.Module) -> list[Any]:
    """Return the children with parameters, and in place of a ModuleList or ModuleDict its members.

    Raises:
        UserError: a parameter belongs directly to the module, so that no forward of a network gathers it.
    """
    if own := [name for name, _ in module.named_parameters(recurse=False)]:
        raise UserError(
            f"The parameter {own[0]} lies on {type(module).__name__} itself, where FSDP does not gather it: put it "
            "into a module with a forward, or choose trainer=ddp (on CPUs ddp_sim)."
        )
    lists = (nn.ModuleList, nn.ModuleDict)
    found = [net for child in module.children() for net in (child.children() if isinstance(child, lists) else [child])]
    return [net for net in found if any(True for _ in net.parameters())]


def gathered(value: Any, keep: bool) -> Any:
    """Return copies in CPU memory of tensors in dicts, of sharded ones whole if `keep`; every rank must call it."""
    if isinstance(value, dict):
        return {name: gathered(part, keep) for name, part in value.items()}
    if isinstance(value, DTensor):
        value = value.detach().full_tensor()
        return value.to("cpu", non_blocking=True) if keep else None
    return value.detach().to("cpu", copy=True, non_blocking=True) if isinstance(value, Tensor) else value


def sharded_like(value: Any, own: Any) -> Any:
    """Return `value` (full, equal on every rank) sharded like `own`; unchanged if `own` is not sharded."""
    if not isinstance(own, DTensor) or not isinstance(value, Tensor) or value.shape != own.shape:
        return value  # as the count of steps
    whole = value.detach().to(torch.device(own.device_mesh.device_type))
    return distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
