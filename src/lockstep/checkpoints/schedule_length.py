"""Refuse a resume with another length if its learning-rate schedule keeps the first length.

A schedule of torch keeps its length in its state, so a checkpoint replaces the length of this
start. The schedules of `scheduler=` compute the rate from the length of this start: they stretch.
"""

from collections.abc import Collection
from typing import Any

import lightning.pytorch as pl

from lockstep.process.errors import UserError

# The names under which torch's schedules keep a length.
LENGTH_NAMES = (
    "T_max",
    "T_0",
    "total_steps",
    "total_iters",
    "step_size",
    "milestones",
    "_milestones",
)


def schedule_lengths(trainer: pl.Trainer) -> list[str]:
    """Return the lengths that the schedules hold now, as `OneCycleLR total_steps=12`."""
    lengths = []
    for config in trainer.lr_scheduler_configs:
        lengths += _lengths_of(config.scheduler)
    return lengths


def _lengths_of(schedule: Any) -> list[str]:
    values = vars(schedule)
    lengths = []
    for name in LENGTH_NAMES:
        if name not in values:
            continue
        value = values[name]
        if isinstance(value, Collection):
            # A checkpoint gives MultiStepLR's Counter back as a dict.
            value = sorted(value)
        lengths.append(f"{type(schedule).__name__} {name.lstrip('_')}={value}")
    # SequentialLR and ChainedScheduler are made of others.
    for part in values.get("_schedulers", ()):
        lengths += _lengths_of(part)
    return lengths


def refuse_other_lengths(trainer: pl.Trainer, lengths: list[str]) -> None:
    """Refuse to train with a schedule that a checkpoint has given another length.

    Args:
        lengths: the lengths of the schedules as this start has built them.
    """
    for length, stored_length in zip(lengths, schedule_lengths(trainer)):
        if length != stored_length:
            raise UserError(
                f"The schedule keeps the length that the run began with ({stored_length}), and "
                f"this start gives it another one ({length}): resume it with the same "
                "trainer.max_epochs, trainer.max_steps and number of ranks, or start a new run "
                "with ckpt_path=."
            )
