"""Lightning's EarlyStopping with a mode that follows its metric, and the reason of a stop."""

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
        mode: min, max or auto. With auto it is the mode of the checkpoints if they monitor the same
            metric; else it is min for losses and errors, and max for scores.
        options: further options of Lightning's EarlyStopping.
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
        for callback in trainer.callbacks:
            has_same_metric = hasattr(callback, "best_path") and callback.monitor == self.monitor
            if self.is_auto and has_same_metric and callback.mode != self.mode:
                super().__init__(self.monitor, mode=callback.mode, **self.options)
        super().setup(trainer, pl_module, stage)


def keep_new_patience(trainer: pl.Trainer, checkpoint: Checkpoint) -> None:
    """Replace the patience in a checkpoint by that of this start before EarlyStopping loads it.

    Lightning's own EarlyStopping is treated in the same way.
    """
    states = checkpoint.get("callbacks", {})
    for callback in trainer.callbacks:
        if isinstance(callback, callbacks.EarlyStopping) and callback.state_key in states:
            states[callback.state_key]["patience"] = callback.patience


def reason_of_early_stop(trainer: pl.Trainer) -> str | None:
    """Return why EarlyStopping, also Lightning's own, has ended this fit; None if it has not."""
    if not is_ended_by_callback(trainer):
        return None
    for callback in trainer.callbacks:
        if isinstance(callback, callbacks.EarlyStopping) and callback.stopping_reason_message:
            return callback.stopping_reason_message.removesuffix(" Signaling Trainer to stop.")
    return None
