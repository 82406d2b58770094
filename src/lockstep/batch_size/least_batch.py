"""The smallest batch that a net trains at: BatchNorm that sees one value for each channel refuses a single image."""

import logging
from typing import Any

import torch

from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.strategies.placement import parts_of_batch
from lockstep.training.build import build_module
from lockstep.training.checks import DataFacts

log = logging.getLogger(__name__)


def least_batch(config: Config, facts: DataFacts, world_size: int) -> int:
    """Images for each device, by a forward pass of shapes alone. 1 where the net cannot run so.

    Args:
        facts: num_classes, image_size and channels of the data.
    """
    trainer = config["trainer"]
    if trainer["sync_batchnorm"] and world_size > 1:
        return 1
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            net = build_module(config, facts, trainable=False).net.train()
            refused = not _takes(net, 1, facts) and _takes(net, 2, facts)
    except UserError:
        raise
    except Exception as error:  # an initialisation that wants real numbers
        log.info(f"Whether the net trains at one image is not known ({type(error).__name__}: {error}).")
        return 1
    if not refused:
        return 1
    return 2 * parts_of_batch(trainer)


def _takes(net: Any, batch: int, facts: DataFacts) -> bool:
    shape = (batch, facts["channels"], facts["image_size"], facts["image_size"])
    try:
        net(torch.empty(shape, dtype=next(net.parameters()).dtype))
    except ValueError:  # BatchNorm's "Expected more than 1 value per channel when training"
        return False
    return True
