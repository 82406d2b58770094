"""Log epoch, loss, monitored metrics and images per second in a line from time to time."""

import logging
import math
import time
from typing import Any

import lightning.pytorch as pl

from lockstep.checkpoints.resume_point import ends_epoch, epoch_text, micro_batches_done
from lockstep.records.metric_names import format_metric

log = logging.getLogger(__name__)


class Progress(pl.Callback):
    """Log a line of progress now and then, on rank 0.

    Args:
        interval_s: seconds between two lines within an epoch or an evaluation.
        short_epoch_s: an epoch (or the part of it up to a validation) that takes less has a line
            only if there was none for four times as long.
    """

    def __init__(self, interval_s: float = 30.0, short_epoch_s: float = 5.0) -> None:
        self.interval_s = interval_s
        self.short_epoch_s = short_epoch_s
        self.began_at = time.monotonic()
        self.logged_at = self.began_at

    def _log_line(self, trainer: pl.Trainer, position: str, after_s: float) -> None:
        """Log a line, such as "epoch 1/3 · batch 3/10 · loss 0.6931", every `after_s` seconds."""
        if not trainer.is_global_zero:
            return
        if time.monotonic() - self.logged_at < after_s:
            return

        self.logged_at = time.monotonic()
        parts = [f"epoch {epoch_text(trainer)}", position, *metric_texts(trainer)]
        log.info(" · ".join(parts))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began_at = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._log_line(trainer, batch_position(trainer), self.interval_s)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        count = sum(trainer.num_val_batches)
        self._log_line(trainer, f"validating {batch_idx + 1}/{count:g}", self.interval_s)

    def on_test_batch_end(
        self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        count = sum(trainer.num_test_batches)
        self._log_line(trainer, f"testing {batch_idx + 1}/{count:g}", self.interval_s)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # The line of an epoch's last validation comes at the end of the epoch.
        is_in_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        if is_in_fit and not ends_epoch(trainer):
            self._log_line(trainer, f"{batch_position(trainer)} · validated", self.short_epoch_s)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Lightning computes the epoch's metrics when they are first read, which is a collective.
        # All ranks read them here, whether or not rank 0 shows a line.
        _ = trainer.callback_metrics
        position = "done" if ends_epoch(trainer) else batch_position(trainer)

        is_last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        is_long = time.monotonic() - self.began_at > self.short_epoch_s
        after_s = 4 * self.short_epoch_s
        if is_last or is_long:
            after_s = 0.0
        self._log_line(trainer, position, after_s)


def metric_texts(trainer: pl.Trainer) -> list[str]:
    """Return the training loss, the monitored metrics and the speed, as far as they are logged."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    monitors = []
    for callback in trainer.callbacks:
        values |= getattr(callback, "latest_row", {})
        if hasattr(callback, "monitor"):
            monitors.append(str(callback.monitor))

    parts = []
    if "train/loss" in values:
        parts.append(f"loss {values['train/loss']:.4f}")
    for name in dict.fromkeys(monitors or ["val/acc"]):
        if name in values:
            parts.append(f"{name.replace('/', ' ')} {format_metric(name, values[name])}")
    if "images_per_s" in values:
        parts.append(f"{values['images_per_s']:,.0f} images/s")
    return parts


def batch_position(trainer: pl.Trainer) -> str:
    """Return "batch 3/10"; without the number of batches where the data have no length."""
    done = micro_batches_done(trainer)
    if trainer.num_training_batches == math.inf:
        return f"batch {done}"
    return f"batch {done}/{int(trainer.num_training_batches)}"
