"""A fast small network for 32 px images, after github.com/KellerJordan/cifar10-airbench, sized for a CPU.

python src/train.py experiment=cifar10_cpu
"""

import torch
from torch import Tensor, nn

from lockstep.runs.errors import UserError

WHITENING_KERNEL = 2
WHITENING_EPS = 5e-4


class Conv(nn.Conv2d):
    """A 3x3 convolution without bias, initialised as the identity (dirac)."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__(channels_in, channels_out, 3, padding=1, bias=False)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            nn.init.dirac_(self.weight[: self.in_channels])


class BatchNorm(nn.BatchNorm2d):
    """BatchNorm with statistics of few batches and no trained scale: Muon keeps the norm of the weights before it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6, momentum=0.4)
        self.weight.requires_grad_(False)


class ConvGroup(nn.Sequential):
    """The layers conv, halve, norm, GELU, then depth - 1 times conv, norm, GELU."""

    def __init__(self, channels_in: int, width: int, depth: int) -> None:
        layers: list[nn.Module] = [Conv(channels_in, width), nn.MaxPool2d(2), BatchNorm(width), nn.GELU()]
        for _ in range(depth - 1):
            layers += [Conv(width, width), BatchNorm(width), nn.GELU()]
        super().__init__(*layers)


class Airbench(nn.Module):
    """A net from normalised images (B, channels, image_size, image_size) to logits (B, num_classes).

    Call `init_from_images` before training: without it the first convolution stays random and untrained.

    Args:
        widths: channels of each group; every group halves the image.
        depth: convolutions in a group.

    Raises:
        UserError: the image is too small for the groups.
    """

    def __init__(
        self,
        num_classes: int,
        image_size: int,
        channels: int,
        widths: tuple[int, ...] = (32, 96, 192),
        depth: int = 2,
        head_scale: float = 1 / 256,
    ) -> None:
        super().__init__()
        smallest = 2 ** len(widths) + WHITENING_KERNEL - 1
        if image_size < smallest:
            raise UserError(f"model=airbench takes images of {smallest} px or more, not data.image_size={image_size}.")
        whitened = 2 * channels * WHITENING_KERNEL**2
        self.whiten = nn.Conv2d(channels, whitened, WHITENING_KERNEL)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)
        inputs = (whitened, *widths[:-1])
        self.groups = nn.Sequential(
            *(ConvGroup(before, width, depth) for before, width in zip(inputs, widths, strict=True))
        )
        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.normal_(self.head.weight, std=head_scale)  # nearly equal logits at the start
        self.activation, self.pool = nn.GELU(), nn.AdaptiveMaxPool2d(1)

    @torch.no_grad()
    def init_from_images(self, images: Tensor) -> None:
        """Make the first convolution whiten 2x2 patches; images: (N, channels, H, W) normalised, N in the thousands."""
        kernel, device = WHITENING_KERNEL, self.whiten.weight.device
        patches = images.double().unfold(2, kernel, 1).unfold(3, kernel, 1)
        flat = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, images.shape[1] * kernel**2)
        values, vectors = torch.linalg.eigh(flat.T @ flat / len(flat))
        rows = (vectors / (values + WHITENING_EPS).sqrt()).T
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        rows = rows * largest.sign()  # eigenvectors have no sign of their own; this gives every machine the same
        weight = torch.cat([rows, -rows]).reshape(self.whiten.weight.shape)
        self.whiten.weight.copy_(weight.to(device))

    def forward(self, images: Tensor) -> Tensor:
        features = self.groups(self.activation(self.whiten(images)))
        return self.head(self.pool(features).flatten(1))

    def shard_units(self) -> list[nn.Module]:
        return list(self.groups)

    def stages(self) -> list[nn.Module]:
        first = nn.Sequential(self.whiten, self.activation)
        return [first, *self.groups, nn.Sequential(self.pool, nn.Flatten(), self.head)]
