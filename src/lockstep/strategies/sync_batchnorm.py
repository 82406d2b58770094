"""BatchNorm over the global batch, on CPUs too, where torch's SyncBatchNorm refuses; what BatchNorm asks of a batch."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.process.errors import UserError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduce of the gradients: each rank's loss depends on each rank's input."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        total = tensor.contiguous().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _SumOverRanks.forward(ctx, gradient)


class SyncBatchNorm(nn.BatchNorm2d):  # not nn.SyncBatchNorm: DDP refuses that one on CPUs
    """BatchNorm whose training statistics are those of all ranks' batches together, of unequal sizes too.

    One all-reduce sums count, mean and mean square per channel in float64, so that nothing cancels in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = self.running_mean, self.running_var
        if not self.training:
            return F.batch_norm(input, mean, variance, self.weight, self.bias, training=mean is None, eps=self.eps)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        variance, mean = (value.double() for value in torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0))
        count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
        total = _SumOverRanks.apply(torch.cat([count, count * mean, count * (variance + mean * mean)]))
        count = total[0].detach()
        mean, square = (total[1:] / count).chunk(2)
        variance = (square - mean * mean).clamp_min(0.0)
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
                self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), weight)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        x = (x - mean.to(x.dtype).view(shape)) * torch.rsqrt(variance + self.eps).to(x.dtype).view(shape)
        if self.affine:
            x = x * self.weight.to(x.dtype).view(shape) + self.bias.to(x.dtype).view(shape)
        return x.to(input.dtype)


class _ThenAct:
    """The activation within timm's BatchNormAct2d, after dropout of whole channels in some nets."""

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))  # type: ignore[attr-defined,misc]


def synchronise(net: nn.Module, device_type: str) -> None:
    """Turn every BatchNorm into one over all ranks, in place: torch's layer on "cuda", ours elsewhere.

    Raises:
        UserError: a layer has a forward of its own, which would be lost.
    """
    plain: type[nn.Module] = nn.SyncBatchNorm if device_type == "cuda" else SyncBatchNorm
    with_activation = type("SyncBatchNormAct", (_ThenAct, plain), {})
    for layer in net.modules():
        if not isinstance(layer, BATCH_NORMS) or isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm):
            continue
        children = dict(layer.named_children()).keys()
        is_timms = type(layer).__module__.startswith("timm.") and children >= {"drop", "act"}
        if not is_timms and type(layer).forward is not nn.BatchNorm2d.forward:
            raise UserError(
                f"trainer.sync_batchnorm=true cannot convert {type(layer).__name__}, which has a forward of its own: "
                "leave it out, or build the net with plain nn.BatchNorm layers."
            )
        layer.__class__ = with_activation if is_timms else plain
        layer.process_group = None  # torch's attribute: all ranks


def check_batch_norm(
    net: nn.Module, *, images: int, world_size: int, micro_batches: int, synchronised: bool
) -> str:
    """Return a sentence if BatchNorm makes the result depend on the number of ranks, else "".

    Args:
        images: that go through the net of one device at a time.
        micro_batches: trainer.accumulate_grad_batches (times micro_batches of model_parallel).

    Raises:
        UserError: one image at a time has no statistics; names the sizes that work.
    """
    if not any(isinstance(layer, BATCH_NORMS) and layer.training for layer in net.modules()):
        return ""
    differs = world_size > 1 and not synchronised
    if images < 2 and (differs or world_size == 1):
        size = 2 * world_size * micro_batches
        synced = ", trainer.sync_batchnorm=true" if differs else ""
        raise UserError(
            "BatchNorm cannot normalise one image at a time: give data.global_batch_size="
            f"{size} or more{synced}, or a net without BatchNorm."
        )
    if not differs:
        return ""
    return (
        f"The model has BatchNorm, and each of the {world_size} ranks normalises with its own part "
        "of the batch: trainer.sync_batchnorm=true uses the whole batch, as one process does."
    )
