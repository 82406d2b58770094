"""Callbacks in which one rank of a training comes to harm at its third step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

STEP, RANK = 2, 1


class Harmed(Callback):
    """
    Args:
        how: the name of a function below.
        flag: a file that begins to exist when it happens; the null GPU's faults wait for one.
    """

    def __init__(self, how: str, flag: str) -> None:
        self.how, self.flag = how, Path(flag)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEP and trainer.global_rank == RANK:
            self.flag.write_text(str(time.monotonic()))
            globals()[self.how](pl_module)


def dies(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(_: Any) -> None:
    time.sleep(1000)


def runs_out_of_memory(module: Any) -> None:
    torch.empty(2**50, dtype=torch.uint8, device=module.device)


def goes_on(_: Any) -> None:
    """The null GPU does the harm from now on."""
