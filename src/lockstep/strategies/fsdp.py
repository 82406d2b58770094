"""Shard the training (FSDP2): each rank keeps 1/N of weights, gradients and optimizer state.

trainer=fsdp (GPUs), trainer=fsdp_sim (the same code in CPU processes over gloo). The weights of a
block are gathered just before it computes, and freed after it.
See https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
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

from lockstep.process.errors import UserError
from lockstep.ranks.process_group import all_or_none
from lockstep.strategies.base import (
    ClippingMixedPrecision,
    ProcessPerDevice,
    broadcast_from_rank_zero,
    list_parameters,
    list_shard_units,
)
from lockstep.strategies.sync_batchnorm import list_batch_norms

log = logging.getLogger(__name__)

StateDict = dict[str, Any]
LOW_PRECISION = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedPrecision(ClippingMixedPrecision):
    """Train in bf16, or in fp16 with loss scaling.

    Shards and reduced gradients are float32. Gathered weights have 16 bits.
    """

    # Lightning stores a plugin's state under this name. With the name of Lightning's class, a run
    # of DDP resumes under FSDP with its loss scale, and the other way round.
    __qualname__ = "MixedPrecision"

    def forward_context(self) -> Any:
        """Return no autocast, because fully_shard casts weights and inputs."""
        return nullcontext()


class FSDP(ProcessPerDevice):
    """Shard each network of the LightningModule by fully_shard, after its `shard_units()`.

    Args:
        shard_within_node: shard over the ranks of a node and replicate over nodes (HSDP). The
            gathers stay inside a node, which pays off if the network between nodes is slow and
            the model fits one node.
        reshard_after_forward: free a unit's weights between forward and backward; False trades
            memory for time.
    """

    no_ema = (
        "averaged weights would be a second sharded network, gathered in every validation and "
        "checkpoint"
    )
    compiles_units = True
    # Lightning then loads a checkpoint after setup(), into the shards.
    restore_checkpoint_after_setup = True

    def __init__(self, shard_within_node: bool = False, reshard_after_forward: bool = True) -> None:
        super().__init__()
        self.shard_within_node = shard_within_node
        self.reshard_after_forward = reshard_after_forward

    @staticmethod
    def precision_for(precision: str, device_type: str) -> Precision | None:
        if precision in LOW_PRECISION:
            return ShardedPrecision(precision, device_type)
        return None

    def setup_environment(self) -> None:
        super().setup_environment()
        shape: tuple[int, ...] = (self.world_size,)
        names: tuple[str, ...] = ("shard",)
        if self.shard_within_node:
            per_node = len(self.parallel_devices)
            shape = (self.world_size // per_node, per_node)
            names = ("replicate", "shard")
        with all_or_none():
            self.device_mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    def setup(self, trainer) -> None:
        self.accelerator.setup(trainer)
        module = self.lightning_module
        self.model = self.precision_plugin.convert_module(module)
        networks = find_networks(module)
        has_units = any(hasattr(net, "shard_units") for net in networks)
        if not has_units and self.is_global_zero:
            log.info(
                "The model does not define shard_units(): FSDP gathers all its weights at once "
                "and saves little."
            )
        for net in networks:
            # A second fit finds networks that are sharded already.
            if not isinstance(net, FSDPModule):
                self._shard(net)
        self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def model_to_device(self) -> None:
        """Move what is not sharded; the shards lie on the device already."""
        self.lightning_module.to(self.root_device)

    def teardown(self) -> None:
        """Tear down without Lightning's move of the shards to the CPU."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    def _shard(self, net: nn.Module) -> None:
        broadcast_from_rank_zero([*net.parameters(), *net.buffers()], self.root_device)
        for parameter in net.parameters():
            # fully_shard refuses channels_last weights.
            parameter.data = parameter.data.contiguous()

        shard = partial(
            fully_shard, mesh=self.device_mesh, reshard_after_forward=self.reshard_after_forward
        )
        unit_policy = MixedPrecisionPolicy()
        net_policy = MixedPrecisionPolicy()
        if isinstance(self.precision_plugin, ShardedPrecision):
            low = LOW_PRECISION[self.precision_plugin.precision]
            full = torch.float32
            unit_policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=full)
            # The logits are float32.
            net_policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=full, output_dtype=full)
            # BatchNorm computes its statistics in float32.
            norm_policy = MixedPrecisionPolicy(full, full, output_dtype=low)
            for layer in list_batch_norms(net):
                shard(layer, mp_policy=norm_policy)

        for unit in list_shard_units(net):
            shard(unit, mp_policy=unit_policy)
        shard(net, mp_policy=net_policy)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients.

        Lightning enters this in all but the last micro-batch of an accumulated step.
        """
        networks = find_networks(self.lightning_module)
        for net in networks:
            net.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for net in networks:
                net.set_requires_gradient_sync(True)

    # Checkpoints hold whole tensors, so that any strategy and world size can load them. Every rank
    # gathers, rank 0 saves. torch's get_optimizer_state_dict is not used, because it runs an
    # optimizer step if the state is empty.

    def lightning_module_state_dict(self) -> StateDict:
        return self._gather(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> StateDict:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        state = optimizer.state_dict()
        return {**state, "state": self._gather(state["state"])}

    def _gather(self, state: Mapping[Any, Any]) -> StateDict:
        """Return the whole state on rank 0, an empty one elsewhere; every rank must call it."""
        whole_state: StateDict = gather_tensors(state, self.is_global_zero)
        if torch.cuda.is_initialized():
            # The copies from the GPU are only queued.
            torch.cuda.current_stream().synchronize()
        if not self.is_global_zero:
            return {}
        return whole_state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        current = self.lightning_module.state_dict()
        state = {
            name: shard_like(value, current.get(name))
            for name, value in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        for optimizer, whole_state in zip(self.optimizers, states, strict=True):
            # A checkpoint names each parameter by its number over all groups.
            by_number = dict(enumerate(list_parameters(optimizer)))
            sharded = {
                number: _shard_moments(moments, by_number.get(number))
                for number, moments in whole_state["state"].items()
            }
            optimizer.load_state_dict({**whole_state, "state": sharded})


def _shard_moments(moments: Mapping[str, Any], parameter: Tensor | None) -> StateDict:
    return {name: shard_like(value, parameter) for name, value in moments.items()}


def find_networks(module: nn.Module) -> list[Any]:
    """Return the children with parameters, and in place of a ModuleList or ModuleDict its members.

    Raises:
        UserError: a parameter belongs directly to the module, so that no forward of a network
            gathers it.
    """
    for name, _ in module.named_parameters(recurse=False):
        raise UserError(
            f"The parameter {name} lies on {type(module).__name__} itself, where FSDP does not "
            "gather it: put it into a module with a forward, or choose trainer=ddp "
            "(on CPUs ddp_sim)."
        )
    networks: list[nn.Module] = []
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            networks.extend(child.children())
        else:
            networks.append(child)
    return [net for net in networks if list(net.parameters())]


def gather_tensors(value: Any, keep: bool) -> Any:
    """Return nested dicts with copies of their tensors in CPU memory; every rank must call it.

    Args:
        keep: a sharded tensor becomes a whole one; otherwise it becomes None, as on ranks that
            save nothing.
    """
    if isinstance(value, dict):
        return {name: gather_tensors(part, keep) for name, part in value.items()}
    if isinstance(value, DTensor):
        whole_tensor = value.detach().full_tensor()
        if not keep:
            return None
        return whole_tensor.to("cpu", non_blocking=True)
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, non_blocking=True)
    return value


def shard_like(value: Any, sharded: Any) -> Any:
    """Return a whole tensor cut over the ranks as the tensor `sharded` is.

    Anything else stays, such as the count of steps.

    Args:
        value: equal on every rank.
    """
    if not isinstance(sharded, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != sharded.shape:
        return value
    mesh = sharded.device_mesh
    whole_tensor = value.detach().to(torch.device(mesh.device_type))
    return distribute_tensor(whole_tensor, mesh, sharded.placements, src_data_rank=None)
