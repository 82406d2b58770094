"""A learning rate that rises in the warm-up and then falls along half a cosine or a straight line.

python src/train.py scheduler=cosine scheduler.warmup_epochs=5          (or scheduler=linear)
"""

import logging
import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

log = logging.getLogger(__name__)


def warmup_steps(warmup_epochs: float, steps_per_epoch: int, total_steps: int) -> int:
    """Return the length of the warm-up in optimizer steps, and warn if training ends before it."""
    steps = round(warmup_epochs * steps_per_epoch)
    if steps >= total_steps > 0:
        log.warning(
            f"scheduler.warmup_epochs={warmup_epochs:g} takes {steps:,} steps and training "
            f"{total_steps:,}: the learning rate never reaches optimizer.lr."
        )
    return steps


def cosine(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    warmup_epochs: float = 0.0,
    final_share: float = 0.0,
    straight: bool = False,
) -> LambdaLR:
    """Return a schedule that rises to lr and falls to final_share of it.

    It is stepped at each optimizer step. With lr 0.1, final_share 0.01 and no warm-up, the rate is
    0.1 at the first step, 0.0505 at half of the training and 0.001 at its end.

    Args:
        straight: fall along a straight line, as `linear` does.
    """
    warmup = warmup_steps(warmup_epochs, steps_per_epoch, total_steps)

    def factor(step: int) -> float:
        """Return the factor of lr at a step."""
        if step < warmup:
            return (step + 1) / (warmup + 1)

        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        remaining = 1 - progress
        if not straight:
            remaining = 0.5 * (1 + math.cos(math.pi * progress))
        return final_share + (1 - final_share) * remaining

    return LambdaLR(optimizer, factor)


def linear(
    optimizer: Optimizer,
    *,
    warmup_epochs: float = 0.0,
    final_share: float = 0.0,
    **steps: int,
) -> LambdaLR:
    """Return a schedule as `cosine` does, which falls along a straight line."""
    return cosine(
        optimizer, warmup_epochs=warmup_epochs, final_share=final_share, straight=True, **steps
    )
