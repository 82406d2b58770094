"""A small U-Net (arXiv 1505.04597): logits for each pixel.

python src/train.py task=segmentation model=unet data=image_folder data.root=DIR data.target=mask
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class UNet(nn.Module):
    """
    Args:
        width: channels at full resolution; each of the `depth` levels below has twice as many as the one above.
    """

    def __init__(self, num_classes: int, image_size: int, channels: int, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(_block(before, after) for before, after in zip([channels, *widths], widths))
        pairs = list(zip(widths, widths[1:]))
        self.up = nn.ModuleList(_block(wide + narrow, narrow) for narrow, wide in reversed(pairs))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return (B, num_classes, H, W)."""
        levels = [self.down[0](images)]
        for block in self.down[1:]:
            levels.append(block(F.max_pool2d(levels[-1], 2)))
        features = levels.pop()
        for block in self.up:
            above = levels.pop()
            features = block(torch.cat([F.interpolate(features, above.shape[2:]), above], 1))
        return self.head(features)

    def shard_units(self) -> list[nn.Module]:
        return [*self.down, *self.up]


def _block(before: int, after: int) -> nn.Sequential:
    layers = (nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
    return nn.Sequential(*layers, nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
