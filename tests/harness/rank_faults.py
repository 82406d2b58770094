"""A callback in which one rank of a training comes to harm."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback


class Harmed(Callback):
    """
    Args:
        how: the name of a function below.
        flag: a file that begins to exist when it happens; the simulated driver's faults wait for one.
        hook: where it happens, at the third batch of rank 1.
    """

    def __init__(self, how: str, flag: str, hook: str = "on_train_batch_start") -> None:
        self.how, self.flag, self.calls = how, Path(flag), 0
        setattr(self, hook, self._harm)

    def _harm(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.calls += 1
        if self.calls == 3 and trainer.global_rank == 1:
            self.flag.write_text(str(time.monotonic()))
            globals()[self.how](pl_module)


def dies(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_: Any) -> None:
    time.sleep(1000)


def fails(_: Any) -> None:
    raise ValueError("rank one is unhappy")


def runs_out_of_memory(module: Any) -> None:
    torch.empty(2**50, dtype=torch.uint8, device=module.device)


def goes_on(_: Any) -> None:
    """The simulated driver does the harm from now on."""
