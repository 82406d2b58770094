"""Lightning's EarlyStopping with the direction of its metric, and what it says of the run."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks

from lockstep.checkpoints.load import Checkpoint
from lockstep.checkpoints.resume_point import is_ended_by_callback
from lockstep.process.errors import UserError
from lockstep.records.metric_names import is_lower_better


class EarlyStopping(callbacks.EarlyStopping):
    """Stop when a metric no longer improves.

    Args:
        mode: min, max, or auto: as the best checkpoint if it goes by the same metric, else min for
            losses and errors and max for scores.
        options: of Lightning's EarlyStopping.
    """

    def __init__(
        self, monitor: str = "val/loss", mode: str = "auto", patience: int = 3, **options: Any
    ) -> None:
        if mode not in ("auto", "min", "max"):
            raise UserError(f"callbacks.early_stopping.mode={mode}: give auto, min or max.")
        self.options = {"patience": patience, **options}
        self.is_auto = mode == "auto"
        if self.is_auto:
            mode = "min" if is_lower_better(monitor) else "max"
        super().__init__(monitor, mode=mode, **self.options)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for part in trainer.callbacks:
            is_of_best = hasattr(part, "best_path") and part.monitor == self.monitor
            if self.is_auto and is_of_best and part.mode != self.mode:
                super().__init__(self.monitor, mode=part.mode, **self.options)
        super().setup(trainer, pl_module, stage)


def keep_new_patience(trainer: pl.Trainer, checkpoint: Checkpoint) -> None:
    """Make EarlyStopping, also Lightning's own, go on with the patience that this start gives it.

    Lightning takes that of the checkpoint.
    """
    states = checkpoint.get("callbacks", {})
    for part in trainer.callbacks:
        if isinstance(part, callbacks.EarlyStopping) and part.state_key in states:
            states[part.state_key]["patience"] = part.patience


def reason_of_early_stop(trainer: pl.Trainer) -> str | None:
    """Return why EarlyStopping, also Lightning's own, has ended this fit; None if it has not."""
    if not is_ended_by_callback(trainer):
        return None
    for part in trainer.callbacks:
        if isinstance(part, callbacks.EarlyStopping) and part.stopping_reason_message:
            return part.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
    return None
