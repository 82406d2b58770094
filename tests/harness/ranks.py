"""A fork server that has torch, Lightning and this project imported: processes of it start in 0.1 s
instead of 5.
"""

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

PRELOAD = ["torch.utils.tensorboard", "lightning.pytorch", "torchvision", "timm", "hydra", "boto3",
           "lockstep.runs.opening", "lockstep.runs.starting", "lockstep.ranks.agent", "lockstep.training.build",
           "lockstep.data.image_datamodule", "lockstep.callbacks.training_log", "lockstep.logbook.build",
           "matplotlib.figure", "omegaconf._impl", "sklearn.datasets", "lockstep.commands.command_line",
           "tasks.classifier", "models.small_cnn", "data.digits", "warm"]  # fmt: skip
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)
SRC = Path(__file__).resolve().parents[2] / "src"


def new_process(target: Callable, args: tuple) -> multiprocessing.Process:
    """Forked from the server, which imports this tree's code and not that of the tree that is
    installed.
    """
    paths = [str(SRC), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        forkserver.ensure_running()
    return _context.Process(target=target, args=args)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
