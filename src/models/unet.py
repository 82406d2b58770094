"""A small U-Net (arXiv 1505.04597), which gives logits for each pixel.

python src/train.py task=segmentation model=unet data=image_folder data.root=DIR data.target=mask
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """A net from images (B, channels, H, W) to the logits of each pixel (B, num_classes, H, W).

    Args:
        width: the number of channels at full resolution.
        depth: the number of lower levels. Each has twice as many channels as the level above.
    """

    def __init__(
        self, num_classes: int, image_size: int, channels: int, width: int = 32, depth: int = 3
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        inputs = [channels, *widths[:-1]]
        self.down = nn.ModuleList(
            _block(channels_in, level_width) for channels_in, level_width in zip(inputs, widths)
        )

        self.up = nn.ModuleList()
        for level in reversed(range(depth)):
            narrow = widths[level]
            wide = widths[level + 1]
            self.up.append(_block(wide + narrow, narrow))

        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, num_classes, H, W)."""
        levels = [self.down[0](images)]
        for block in self.down[1:]:
            levels.append(block(F.max_pool2d(levels[-1], 2)))

        features = levels.pop()
        for block in self.up:
            skip = levels.pop()
            upsampled = F.interpolate(features, skip.shape[2:])
            features = block(torch.cat([upsampled, skip], 1))
        return self.head(features)

    def shard_units(self) -> list[nn.Module]:
        return [*self.down, *self.up]


def _block(channels_in: int, width: int) -> nn.Sequential:
    """Return two 3x3 convolutions, each with a norm and a ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels_in, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    )
