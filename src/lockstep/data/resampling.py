"""Bilinear resizing with antialiasing as matrices: torchvision's float result by two small products."""

import torch
from torch import Tensor


def resize_matrix(source: int, target: int) -> Tensor:
    """(target, source) float32: row i holds the weights of target pixel i, as torchvision v2 and Pillow compute them.

    The triangle filter is as wide as a source pixel, and wider by source/target where the image shrinks.
    """
    scale = source / target
    support = max(scale, 1.0)
    centre = (torch.arange(target, dtype=torch.float64) + 0.5) * scale
    pixel = torch.arange(source, dtype=torch.float64) + 0.5
    weights = (1 - (pixel - centre[:, None]).abs() / support).clamp_(min=0)
    return (weights / weights.sum(1, keepdim=True)).float()
