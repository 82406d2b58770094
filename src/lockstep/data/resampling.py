"""Bilinear resizing with antialiasing as matrices: torchvision's float result by two small products."""

from math import floor, gcd

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


def phases(source: int, target: int) -> list[tuple[int, float]] | None:
    """How rows repeat when an image grows by p/q: row p·k + i mixes source rows q·k + first(i) and the next.

    Returns:
        (first, weight of the second row) for each i in range(p), counted in rows with one copy of the edge row
        before the image; None where the image shrinks, or where p is so large that a matrix product is faster.
    """
    period = target // gcd(source, target)
    if target < source or period > 8:
        return None
    positions = [(i + 0.5) * source / target - 0.5 for i in range(period)]
    return [(floor(x) + 1, x - floor(x)) for x in positions]


def grow(images: Tensor, across: Tensor, rows: list[tuple[int, float]], out: Tensor, chunk: int = 16) -> Tensor:
    """Enlarge by a matrix product along the width and mixed rows along the height, in chunks that stay in the cache.

    Args:
        images: (n, channels, source, source) float.
        across: (source, target), the transposed resize_matrix.
        rows: phases(source, target).
        out: (n, channels, target, target), written.
    """
    source, target = across.shape
    period, stride = len(rows), source * len(rows) // target
    edged = torch.cat([images[:, :, :1], images, images[:, :, -1:]], 2)
    for start in range(0, len(images), chunk):
        wide = torch.matmul(edged[start : start + chunk].flatten(0, 2), across).view(-1, source + 2, target)
        part = out[start : start + chunk].view(-1, target, target)
        for i, (first, weight) in enumerate(rows):
            count = (target // period - 1) * stride + 1
            upper, lower = wide[:, first : first + count : stride], wide[:, first + 1 : first + 1 + count : stride]
            torch.lerp(upper, lower, weight, out=part[:, i::period])
    return out
