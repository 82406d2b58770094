"""Dropout that draws one byte for each value on a CPU: torch draws serially there."""

import torch
from torch import Tensor, nn

STEPS = 256  # what a byte can tell apart


class Dropout(nn.Dropout):
    """nn.Dropout, the same in distribution: each value is zero with probability p, the others times 1 / (1 - p).

    Bytes are for a p that is a whole number of 256ths (0.25, 0.5); any other, a GPU and torch.compile get nn.Dropout's.
    Draws come from torch's global generator: seeds and resumed runs work as with nn.Dropout.
    """

    def forward(self, values: Tensor) -> Tensor:
        zeros = float(self.p * STEPS)
        plain = values.device.type != "cpu" or not zeros.is_integer() or torch.compiler.is_compiling()
        if plain or not self.training or not 0 < self.p < 1:
            return super().forward(values)
        keep = _bytes_like(values) >= int(zeros)
        return values * keep * (1 / (1 - self.p))


def _bytes_like(values: Tensor) -> Tensor:
    """Random bytes, uint8, in the shape and memory order of values; eight of each draw."""
    draws = torch.empty((values.numel() + 7) // 8, dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
    flat = draws.view(torch.uint8)[: values.numel()]
    for layout in (torch.contiguous_format, torch.channels_last):
        if (layout is torch.contiguous_format or values.ndim == 4) and values.is_contiguous(memory_format=layout):
            return flat.as_strided(values.shape, values.stride())
    return flat.view(values.shape)
