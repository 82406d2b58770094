"""BatchNorm over the global batch: a SyncBatchNorm that also runs on the CPU, where torch's refuses.

Each rank contributes per channel its count, sum and sum of squares; one differentiable all-reduce adds them up,
and every rank normalises with the statistics of the whole batch.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.runs.errors import UserError

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
    """BatchNorm1d/2d/3d whose training statistics are those of all ranks' batches together, of unequal sizes too.

    The sums travel in float64 (a few numbers per channel), made from each rank's own mean and variance, so that
    nothing is lost to cancellation in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            mean, variance = self.running_mean, self.running_var
            return F.batch_norm(input, mean, variance, self.weight, self.bias, training=mean is None, eps=self.eps)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count, mean, variance = _global_statistics(x)
        if self.track_running_stats:
            self._update_running_statistics(count, mean.detach(), variance.detach())
        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = torch.rsqrt(variance + self.eps).to(x.dtype)
        if self.affine:
            scale = scale * self.weight.to(x.dtype)
        normalised = (x - mean.to(x.dtype).view(shape)) * scale.view(shape)
        if self.affine:
            normalised = normalised + self.bias.to(x.dtype).view(shape)
        return normalised.to(input.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, count: Tensor, mean: Tensor, variance: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        weight = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)


def _global_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count (a scalar), mean and biased variance per channel of the ranks' `x: (N, C, …)` together, in float64."""
    variance, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
    variance, mean = variance.double(), mean.double()
    count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    total = _SumOverRanks.apply(torch.cat([count, count * mean, count * (variance + mean * mean)]))
    count, mean, square = total[0].detach(), *(total[1:] / total[0].detach()).chunk(2)
    return count, mean, (square - mean * mean).clamp_min(0.0)


def has_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(layer, BATCH_NORMS) for layer in module.modules())


class _ThenActs:
    """timm's BatchNormAct2d: an activation within the layer, after dropout of whole channels in some nets."""

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))  # type: ignore[attr-defined,misc]


class SyncBatchNormAct(_ThenActs, SyncBatchNorm):
    """The layer above with timm's activation."""


class TorchSyncBatchNormAct(_ThenActs, nn.SyncBatchNorm):
    """torch's layer with timm's activation."""


def synchronise(net: nn.Module, device_type: str) -> None:
    """Turn every BatchNorm into one over all ranks, in place: names, weights and buffers stay.

    Args:
        device_type: "cuda" for torch's fused layers, ours elsewhere.
    Raises:
        UserError: a layer that does something else beside normalising, which would be lost.
    """
    plain: type[nn.Module] = nn.SyncBatchNorm if device_type == "cuda" else SyncBatchNorm
    with_act: type[nn.Module] = TorchSyncBatchNormAct if device_type == "cuda" else SyncBatchNormAct
    for layer in [layer for layer in net.modules() if isinstance(layer, BATCH_NORMS)]:
        own = type(layer)
        if isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm):
            continue
        if own.forward is nn.BatchNorm2d.forward:
            layer.__class__ = plain
        elif own.__module__.startswith("timm.") and {"drop", "act"} <= dict(layer.named_children()).keys():
            layer.__class__ = with_act
        else:
            raise UserError(
                f"trainer.sync_batchnorm=true does not know what {own.__name__} does beside normalising: leave it "
                "out, or build the net with plain nn.BatchNorm layers."
            )
        layer.process_group = None  # torch's: all ranks


def batch_norm_warnings(net: nn.Module, *, world_size: int, micro_batches: int, synchronised: bool) -> list[str]:
    """One sentence for each way in which BatchNorm makes the result depend on how the work is spread.

    Args:
        micro_batches: trainer.accumulate_grad_batches (times trainer.micro_batches of model_parallel).
    """
    if not has_batch_norm(net):
        return []
    warnings = []
    if world_size > 1 and not synchronised:
        warnings.append(
            f"The model has BatchNorm, and each of the {world_size} ranks normalises with its own part of the batch: "
            "trainer.sync_batchnorm=true uses the whole batch, as one process does."
        )
    if micro_batches > 1:
        warnings.append(
            f"The model has BatchNorm, and the batch comes in {micro_batches} micro-batches: the statistics are those "
            "of a micro-batch, so the result differs from that of the whole batch at once."
        )
    return warnings
