"""Resizing with antialiasing as matrices: torchvision's float result by two small products."""

import torch
from torch import Tensor

CUBIC = -0.5  # Pillow's and torchvision's with antialiasing: Keys' kernel


def resize_matrix(source: int, target: int, interpolation: str = "bilinear") -> Tensor:
    """(target, source) float32: row i holds the weights of target pixel i, as torchvision v2 and Pillow compute them.

    The filter is as wide as if the image kept its size, and wider by source/target where the image shrinks.

    Args:
        interpolation: bilinear or bicubic.
    """
    scale = source / target
    stretch = max(scale, 1.0)
    centre = (torch.arange(target, dtype=torch.float64) + 0.5) * scale
    pixel = torch.arange(source, dtype=torch.float64) + 0.5
    distance = (pixel - centre[:, None]).abs() / stretch
    weights = _cubic(distance) if interpolation == "bicubic" else (1 - distance).clamp_(min=0)
    return (weights / weights.sum(1, keepdim=True)).float()


def _cubic(distance: Tensor) -> Tensor:
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * CUBIC - 4 * CUBIC
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0))
