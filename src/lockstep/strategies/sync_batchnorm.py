"""BatchNorm over the global batch: a SyncBatchNorm that also runs on the CPU, where torch's refuses.

Each rank contributes per channel its count, sum and sum of squares; one differentiable all-reduce adds them up,
and every rank normalises with the statistics of the whole batch.
"""

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.runs.errors import UserError


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduce of the gradients: each rank's loss depends on each rank's input."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class SyncBatchNorm(_BatchNorm):
    """BatchNorm1d/2d/3d whose training statistics are those of all ranks' batches together, of unequal sizes too.

    The sums travel in float64 (a few numbers per channel), made from each rank's own mean and variance, so that
    nothing is lost to cancellation in float32.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Any (N, C, …)."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized() and dist.get_world_size() > 1):
            return super().forward(input)
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
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


class _ThenActs:
    """timm's BatchNormAct2d: an activation within the layer, after dropout of whole channels in some nets."""

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))  # type: ignore[attr-defined,misc]


class SyncBatchNormAct(_ThenActs, SyncBatchNorm):
    """The layer above with timm's activation."""


class TorchSyncBatchNormAct(_ThenActs, nn.SyncBatchNorm):
    """torch's layer with timm's activation."""


class SyncLayers(LayerSync):
    """Turns every BatchNorm of a model into one over all ranks, in place: names, weights and buffers stay.

    Args:
        plain, with_act: the classes that they become.
    """

    def __init__(self, plain: type[nn.Module], with_act: type[nn.Module]) -> None:
        super().__init__()
        self.plain, self.with_act = plain, with_act

    def apply(self, model: nn.Module) -> nn.Module:
        """
        Raises:
            UserError: a layer that does something else beside normalising, which would be lost.
        """
        layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
        for layer in layers:
            own = type(layer)
            if isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm):
                continue
            if own.forward is _BatchNorm.forward:
                layer.__class__ = self.plain
            elif own.__module__.startswith("timm.") and {"drop", "act"} <= layer._modules.keys():
                layer.__class__ = self.with_act
            else:
                raise UserError(
                    f"trainer.sync_batchnorm=true does not know what {own.__name__} does beside normalising: leave it "
                    "out, or build the net with plain nn.BatchNorm layers."
                )
            layer.class_without_sync = own
            layer.process_group = None  # torch's: all ranks
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for layer in model.modules():
            if hasattr(layer, "class_without_sync"):
                layer.__class__ = layer.class_without_sync
                del layer.class_without_sync
        return model


def layer_sync(device_type: str) -> LayerSync:
    """The plugin behind `trainer.sync_batchnorm=true`: torch's fused SyncBatchNorm on GPUs, ours elsewhere."""
    if device_type == "cuda":
        return SyncLayers(nn.SyncBatchNorm, TorchSyncBatchNormAct)
    return SyncLayers(SyncBatchNorm, SyncBatchNormAct)


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
