"""Define what a strategy states about itself, and the base class of one process per device."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lockstep.process.errors import UserError
from lockstep.ranks.process_group import wait_for_all


class ClippingMixedPrecision(MixedPrecision):
    """Autocast that also clips gradients of a fused optimizer in bf16.

    Lightning refuses to clip them, because it expects scaled losses. In bf16 nothing is scaled.
    """

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        if self.scaler is None:
            # Skip MixedPrecision's refusal.
            Precision.clip_gradients(self, *args, **kwargs)
        else:
            super().clip_gradients(*args, **kwargs)


class Capabilities:
    """Facts about a strategy; a base beside Lightning's class.

    Attributes:
        no_ema: why trainer.ema_decay cannot average the weights; empty if it can.
        supports_compile: trainer.compile can compile the net.
        compiles_units: trainer.compile compiles the forward of each of shard_units(), inside the
            hooks that gather its weights.
        scales_losses: the strategy can scale losses, which fp16 needs.
        spreads_net: the strategy replaces the forward of the module's `net`, which must exist.
        micro_batches: the number of parts in which a batch goes through the net.
        replicas: the copies of the net in one process; each takes a part of the batch.
        process_devices: the devices of one process if it computes on several; one may occur twice.
    """

    no_ema = ""
    supports_compile = True
    compiles_units = False
    scales_losses = True
    spreads_net = False
    micro_batches = 1
    replicas = 1
    process_devices: Sequence[torch.device] = ()

    @staticmethod
    def precision_for(precision: str, device_type: str) -> Precision | None:
        """Return a plugin for the Trainer in place of `precision=`; None if Lightning's works."""
        if precision == "bf16-mixed":
            return ClippingMixedPrecision(precision, device_type)
        return None


def capabilities(strategy: Any) -> Capabilities:
    """Return what any strategy can do, also one of Lightning's."""
    if isinstance(strategy, Capabilities):
        return strategy
    return Capabilities()


class ProcessPerDevice(Capabilities, DDPStrategy):
    """One process per device, started already: Lightning's DDPStrategy without the wrapper."""

    @property
    def launcher(self) -> None:
        """Start no ranks, because they exist already."""

    def setup_environment(self) -> None:
        """Set up the ranks.

        Raises:
            UserError: a script that does not use src/train.py was not started with torchrun.
        """
        has_launcher = (
            dist.is_initialized() or self.cluster_environment.creates_processes_externally
        )
        if not has_launcher and self.num_nodes * self.num_processes > 1:
            raise UserError(f"{type(self).__name__} needs ranks: start this script with torchrun.")
        super().setup_environment()

    def configure_ddp(self) -> None:
        """Keep the module as it is."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save on rank 0, and detect a rank that hangs in the module's on_save_checkpoint.

        Lightning's own barrier would wait for that rank until the timeout.
        """
        super().save_checkpoint(*args, **kwargs)
        # Lightning sets this at any exception, after which a rank may save without the others.
        if not self.lightning_module.trainer.interrupted:
            wait_for_all()

    def on_validation_start(self) -> None:
        """Evaluate with rank 0's buffers, because BatchNorm's statistics differ between ranks.

        Checkpoints hold rank 0's buffers, so that an evaluation of a checkpoint gives the same.
        """
        broadcast_from_rank_zero(self.lightning_module.buffers(), self.root_device)

    on_test_start = on_validation_start


# Users' strategies import this base by its earlier name.
Ranks = ProcessPerDevice


def broadcast_from_rank_zero(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Overwrite each tensor by rank 0's, one at a time, through `device` (NCCL needs a GPU)."""
    if not dist.is_initialized():
        return
    for tensor in tensors:
        buffer = tensor.detach().to(device).contiguous()
        dist.broadcast(buffer, src=0)
        tensor.detach().copy_(buffer)


def list_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of an optimizer, in their order."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters.extend(group["params"])
    return parameters


def list_shard_units(net: nn.Module) -> list[nn.Module]:
    """Return the net's shard_units(); none if it does not define them."""
    return net.shard_units() if hasattr(net, "shard_units") else []
