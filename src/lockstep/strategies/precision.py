"""Precision plugins: autocast where nothing is sharded; inside fully_shard the shards stay float32, what is gathered is
16 bit wide."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.distributed.fsdp import MixedPrecisionPolicy

from lockstep.runs.errors import UserError

LOW_PRECISION = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class BFloat16Mixed(MixedPrecision):
    """Autocast. Lightning's own refuses to clip where the optimizer is fused; but nothing is scaled here.

    Args:
        device_type: "cpu" or "cuda".
    """

    def __init__(self, device_type: str) -> None:
        super().__init__("bf16-mixed", device_type)

    clip_gradients = Precision.clip_gradients


class ShardedPrecision(MixedPrecision):
    """bf16, or fp16 with loss scaling; gradients are reduced in float32 and the logits come out in float32.

    The scaler's state is kept under the name that it has under DDP, so that either resumes from the other.
    """

    def __init__(self, precision: str, device_type: str) -> None:
        scaler = torch.amp.GradScaler(device_type) if precision == "16-mixed" else None
        super().__init__(precision, device_type, scaler)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        (MixedPrecision if self.scaler is not None else Precision).clip_gradients(self, *args, **kwargs)

    @property
    def dtype(self) -> torch.dtype:
        return LOW_PRECISION[self.precision]

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """No autocast: fully_shard casts weights and inputs."""
        yield

    def state_dict(self) -> dict[str, Any]:
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint["MixedPrecision"] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and checkpoint.get("MixedPrecision"):
            self.scaler.load_state_dict(checkpoint["MixedPrecision"])


def precision_for(precision: str, device_type: str) -> Precision:
    """The plugin for a sharded model.

    Raises:
        UserError: a precision that does not exist.
    """
    if precision in LOW_PRECISION:
        return ShardedPrecision(precision, device_type)
    if precision in ("bf16-true", "16-true"):
        return HalfPrecision(precision)
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("32-true", "32"):
        return Precision()
    raise UserError(f"trainer.precision={precision} is unknown: 32-true, bf16-mixed, 16-mixed, bf16-true or 64-true.")


def policies(plugin: Precision) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """For the repeated blocks, for the root, and for BatchNorm, whose statistics need float32."""
    if not isinstance(plugin, ShardedPrecision):
        same = MixedPrecisionPolicy()
        return same, same, same
    block = MixedPrecisionPolicy(param_dtype=plugin.dtype, reduce_dtype=torch.float32)
    root = MixedPrecisionPolicy(param_dtype=plugin.dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    norm = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=plugin.dtype, cast_forward_inputs=True
    )
    return block, root, norm
