"""A learning rate that is multiplied by gamma after every n epochs.

python src/train.py scheduler=step scheduler.gamma=0.7
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def step(
    optimizer: Optimizer,
    *,
    total_steps: int,
    steps_per_epoch: int,
    gamma: float = 0.7,
    every_n_epochs: int = 1,
) -> LambdaLR:
    """Return a schedule, stepped at each optimizer step.

    Args:
        gamma: factor after every n epochs; 0.7 is that of PyTorch's MNIST example.
        every_n_epochs: epochs between two factors.
    """
    interval = max(1, steps_per_epoch * every_n_epochs)  # optimizer steps
    return LambdaLR(optimizer, lambda step: gamma ** (step // interval))
