"""A fast small network for 32 px images, after github.com/KellerJordan/cifar10-airbench.

The widths are sized for a CPU.

python src/train.py experiment=cifar10_cpu
"""

import torch
from torch import Tensor, nn

from lockstep.process.errors import UserError

WHITENING_KERNEL = 2
# The patches of so many pixels, 5,000 images of CIFAR-10, take half a gigabyte.
PIXELS_AT_ONCE = 5000 * 32 * 32
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
    """BatchNorm with statistics over few batches and without a trained scale.

    The scale is not needed, because optimizer=airbench keeps the norm of the weights before it.
    """

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6, momentum=0.4)
        self.weight.requires_grad_(False)


class ConvGroup(nn.Sequential):
    """Convolution, max-pooling, norm and GELU, then depth - 1 times convolution, norm and GELU."""

    def __init__(self, channels_in: int, width: int, depth: int) -> None:
        layers: list[nn.Module] = [
            Conv(channels_in, width),
            nn.MaxPool2d(2),
            BatchNorm(width),
            nn.GELU(),
        ]
        for _ in range(depth - 1):
            layers += [Conv(width, width), BatchNorm(width), nn.GELU()]
        super().__init__(*layers)


class Airbench(nn.Module):
    """A net from normalised images (B, channels, image_size, image_size) to logits.

    The logits are (B, num_classes). `init_from_images` has to be called before training. Without it
    the first convolution, which is not trained, stays random.

    Args:
        widths: the channels of each group. Every group halves the side of the image.
        depth: the number of convolutions in a group.
        head_scale: the standard deviation of the head's initial weights. If it is small, the logits
            are nearly equal at first.

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
            raise UserError(
                f"model=airbench takes images of {smallest} px or more, "
                f"not data.image_size={image_size}."
            )

        # There is a filter for each value of a patch, and the same filters negated.
        whitening_width = 2 * channels * WHITENING_KERNEL**2
        self.whiten = nn.Conv2d(channels, whitening_width, WHITENING_KERNEL)
        self.whiten.weight.requires_grad_(False)
        nn.init.zeros_(self.whiten.bias)

        self.groups = nn.Sequential()
        channels_in = whitening_width
        for width in widths:
            self.groups.append(ConvGroup(channels_in, width, depth))
            channels_in = width

        self.head = nn.Linear(widths[-1], num_classes, bias=False)
        nn.init.normal_(self.head.weight, std=head_scale)
        self.activation = nn.GELU()
        self.pool = nn.AdaptiveMaxPool2d(1)

    @torch.no_grad()
    def init_from_images(self, images: Tensor) -> None:
        """Set the first convolution so that it whitens 2x2 patches.

        Args:
            images: some thousands of normalised images, (N, channels, H, W).
        """
        kernel = WHITENING_KERNEL
        patch_size = images.shape[1] * kernel**2
        covariance = torch.zeros(patch_size, patch_size, dtype=torch.double, device=images.device)
        num_patches = 0
        # All patches of large images would take gigabytes.
        for chunk in images.split(max(1, PIXELS_AT_ONCE // images[0, 0].numel())):
            patches = chunk.double().unfold(2, kernel, 1).unfold(3, kernel, 1)
            flat_patches = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, patch_size)
            covariance += flat_patches.T @ flat_patches
            num_patches += len(flat_patches)
        covariance /= num_patches

        eigenvalues, eigenvectors = torch.linalg.eigh(covariance)
        filters = (eigenvectors / (eigenvalues + WHITENING_EPS).sqrt()).T

        # The sign of an eigenvector is arbitrary. Its largest entry is made positive, so that every
        # machine has the same filters.
        largest = filters.gather(1, filters.abs().argmax(1, keepdim=True))
        filters = filters * largest.sign()

        weight = torch.cat([filters, -filters]).reshape(self.whiten.weight.shape)
        self.whiten.weight.copy_(weight.to(self.whiten.weight.device))

    def forward(self, images: Tensor) -> Tensor:
        features = self.groups(self.activation(self.whiten(images)))
        return self.head(self.pool(features).flatten(1))

    def shard_units(self) -> list[nn.Module]:
        return list(self.groups)

    def stages(self) -> list[nn.Module]:
        whitening_stage = nn.Sequential(self.whiten, self.activation)
        head_stage = nn.Sequential(self.pool, nn.Flatten(), self.head)
        return [whitening_stage, *self.groups, head_stage]
