"""A learning rate that rises, stays, and falls in the last part of training.

The three parts are warm-up, stable and decay (arXiv 2404.06395).

python src/train.py scheduler=wsd scheduler.warmup_epochs=1 scheduler.decay_share=0.2
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.process.errors import UserError
from schedulers.cosine import warmup_steps


def wsd(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    warmup_epochs: float = 0.0,
    decay_share: float = 0.2,
    final_share: float = 0.0,
) -> LambdaLR:
    """Return a schedule, stepped per optimizer step.

    Args:
        decay_share: share of all steps in which the rate falls to final_share of lr, 0 to 1.

    Raises:
        UserError: decay_share is not from 0 to 1.
    """
    if not 0 <= decay_share <= 1:
        raise UserError(f"scheduler.decay_share={decay_share}: give a number from 0 to 1.")

    warmup = warmup_steps(warmup_epochs, steps_per_epoch, total_steps)
    decay_steps = round(decay_share * total_steps)

    def factor(step: int) -> float:
        """Return the factor of lr at a step."""
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if decay_steps == 0:
            return 1.0

        steps_left = max(0, total_steps - step)
        remaining = min(1.0, steps_left / decay_steps)
        return final_share + (1 - final_share) * remaining

    return LambdaLR(optimizer, factor)
