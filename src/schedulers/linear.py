"""A learning rate that rises in the warm-up and then falls linearly.

python src/train.py scheduler=linear scheduler.warmup_epochs=1
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from schedulers.cosine import warmup_steps


def linear(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    warmup_epochs: float = 0.0,
    final_share: float = 0.0,
) -> LambdaLR:
    """Return a schedule, stepped per optimizer step, that rises to lr in the warm-up and falls to final_share of it."""
    warmup = warmup_steps(warmup_epochs, steps_per_epoch, total_steps)

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return final_share + (1 - final_share) * (1 - done)

    return LambdaLR(optimizer, share)
