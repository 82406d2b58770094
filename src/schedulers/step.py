"""Learning rate that is multiplied by gamma after each epoch, or after every few.

python src/train.py scheduler=step scheduler.gamma=0.7
"""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def step(
    optimizer: Optimizer, *, total_steps: int, steps_per_epoch: int, gamma: float = 0.7, every_n_epochs: int = 1
) -> LambdaLR:
    """Stepped after each optimizer step, changes at the epochs' ends. gamma 0.7 is PyTorch's MNIST example."""
    length = max(1, steps_per_epoch * every_n_epochs)
    return LambdaLR(optimizer, lambda done: gamma ** (done // length))
