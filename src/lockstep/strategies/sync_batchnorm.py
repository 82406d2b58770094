"""Compute BatchNorm over the global batch, also on CPUs, and check that a batch is large enough.

torch's SyncBatchNorm refuses CPUs.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.process.errors import UserError

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def list_batch_norms(net: nn.Module) -> list[nn.Module]:
    """Return the layers with statistics of a batch."""
    return [layer for layer in net.modules() if isinstance(layer, BATCH_NORMS)]


class _SumOverRanks(torch.autograd.Function):
    """Sum a tensor over the ranks. The gradient is the sum of the ranks' gradients.

    The loss of each rank depends on the input of every rank.
    """

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        total = tensor.contiguous().clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _SumOverRanks.forward(ctx, gradient)


# The base is not nn.SyncBatchNorm, which DDP refuses on CPUs.
class SyncBatchNorm(nn.BatchNorm2d):
    """BatchNorm with the statistics of all ranks' batches together, which may differ in size.

    One all-reduce sums count, mean and mean square per channel. It does so in float64, because the
    variance would lose digits in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=self.running_mean is None,
                eps=self.eps,
            )
        x = input
        if input.dtype in (torch.float16, torch.bfloat16):
            x = input.float()
        mean, variance, count = reduce_statistics(x)
        if self.track_running_stats:
            self._update_running_statistics(
                mean.detach(), (variance * count / (count - 1)).detach()
            )

        shape = (1, -1, *(1,) * (x.dim() - 2))
        scale = torch.rsqrt(variance + self.eps).to(x.dtype).view(shape)
        x = (x - mean.to(x.dtype).view(shape)) * scale
        if self.affine:
            x = x * self.weight.to(x.dtype).view(shape) + self.bias.to(x.dtype).view(shape)
        return x.to(input.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics."""
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def reduce_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance per channel, and the number of values of a channel, in float64."""
    axes = [0, *range(2, x.dim())]
    variance, mean = torch.var_mean(x, dim=axes, correction=0)
    variance = variance.double()
    mean = mean.double()
    count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.float64, device=x.device)
    sums = torch.cat([count, count * mean, count * (variance + mean * mean)])
    total = _SumOverRanks.apply(sums)
    count = total[0].detach()
    mean, square = (total[1:] / count).chunk(2)
    return mean, (square - mean * mean).clamp_min(0.0), count


class _WithActivation:
    """Apply the activation of timm's BatchNormAct2d, after its dropout of whole channels."""

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))  # type: ignore[attr-defined,misc]


def synchronise(net: nn.Module, device_type: str) -> None:
    """Let every BatchNorm of a net normalise over all ranks, in place.

    The layer becomes torch's on "cuda", and this file's on other devices.

    Raises:
        UserError: a layer has its own forward, which would be lost.
    """
    synchronised_class: type[nn.Module] = (
        nn.SyncBatchNorm if device_type == "cuda" else SyncBatchNorm
    )
    class_with_activation = type("SyncBatchNormAct", (_WithActivation, synchronised_class), {})
    for layer in list_batch_norms(net):
        if isinstance(layer, nn.SyncBatchNorm | SyncBatchNorm):
            continue
        if _is_batch_norm_of_timm(layer):
            layer.__class__ = class_with_activation
        elif type(layer).forward is nn.BatchNorm2d.forward:
            layer.__class__ = synchronised_class
        else:
            raise UserError(
                f"trainer.sync_batchnorm=true cannot convert {type(layer).__name__}, which has a "
                "forward of its own: remove this option, or build the net with nn.BatchNorm layers."
            )
        # torch reads this attribute. None means all ranks.
        layer.process_group = None


def _is_batch_norm_of_timm(layer: nn.Module) -> bool:
    """Return whether a layer also applies dropout and an activation, as timm's BatchNormAct2d."""
    children = {name for name, _ in layer.named_children()}
    return type(layer).__module__.startswith("timm.") and {"drop", "act"} <= children


def check_batch_norm(
    net: nn.Module, *, images: int, world_size: int, micro_batches: int, synchronised: bool
) -> str:
    """Return a sentence if BatchNorm makes the result depend on the number of ranks, else "".

    Args:
        images: the images that go through the net of one device at a time.
        micro_batches: trainer.accumulate_grad_batches (times micro_batches of model_parallel).

    Raises:
        UserError: one image at a time has no statistics. The error names the sizes that work.
    """
    if not any(layer.training for layer in list_batch_norms(net)):
        return ""
    depends_on_ranks = world_size > 1 and not synchronised
    if images < 2 and (depends_on_ranks or world_size == 1):
        size = 2 * world_size * micro_batches
        synced = ", trainer.sync_batchnorm=true" if depends_on_ranks else ""
        raise UserError(
            "BatchNorm cannot normalise one image at a time: give data.global_batch_size="
            f"{size} or more{synced}, or a net without BatchNorm."
        )
    if not depends_on_ranks:
        return ""
    return (
        f"The model has BatchNorm, and each of the {world_size} ranks normalises with its own part "
        "of the batch: trainer.sync_batchnorm=true uses the whole batch, as one process does."
    )
