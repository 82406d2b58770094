"""Log epoch, loss, monitored metrics and images per second in a line from time to time."""

import logging
import math
import time
from typing import Any

import lightning.pytorch as pl

from lockstep.callbacks.resume_point import batches_done, ends_epoch, epoch_of
from lockstep.runs.output import as_read

log = logging.getLogger(__name__)


class Progress(pl.Callback):
    """
    Args:
        interval_s: seconds between two lines within an epoch or an evaluation.
        short_epoch_s: an epoch (or the part of it up to a validation) that takes less has a line only if there was
            none for four times as long.
    """

    def __init__(self, interval_s: float = 30.0, short_epoch_s: float = 5.0) -> None:
        self.interval_s, self.short_epoch_s = interval_s, short_epoch_s
        self.began_at = self.shown_at = time.monotonic()

    def _show(self, trainer: pl.Trainer, place: str, after_s: float) -> None:
        """Log the metrics, unless that was done less than `after_s` seconds ago."""
        if not trainer.is_global_zero or time.monotonic() - self.shown_at < after_s:
            return
        self.shown_at = time.monotonic()
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        for callback in trainer.callbacks:
            values |= getattr(callback, "latest", {})
        named = [str(callback.monitor) for callback in trainer.callbacks if hasattr(callback, "monitor")]
        words = [f"epoch {epoch_of(trainer)}", place]
        words += [f"loss {values['train/loss']:.4f}"] if "train/loss" in values else []
        for name in dict.fromkeys(named or ["val/acc"]):
            words += [f"{name.replace('/', ' ')} {as_read(name, values[name])}"] if name in values else []
        words += [f"{values['images_per_s']:,.0f} images/s"] if "images_per_s" in values else []
        log.info(" · ".join(words))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began_at = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._show(trainer, within(trainer), self.interval_s)

    def on_validation_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, i: int, *_: Any) -> None:
        self._show(trainer, f"validating {i + 1}/{sum(trainer.num_val_batches):g}", self.interval_s)

    def on_test_batch_end(self, trainer: pl.Trainer, module: Any, out: Any, batch: Any, i: int, *_: Any) -> None:
        self._show(trainer, f"testing {i + 1}/{sum(trainer.num_test_batches):g}", self.interval_s)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking and not ends_epoch(trainer):
            self._show(trainer, f"{within(trainer)} · validated", self.short_epoch_s)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        is_last = trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
        is_long = time.monotonic() - self.began_at > self.short_epoch_s
        place = "done" if ends_epoch(trainer) else within(trainer)
        self._show(trainer, place, 0.0 if is_last or is_long else 4 * self.short_epoch_s)


def within(trainer: pl.Trainer) -> str:
    whole = "" if trainer.num_training_batches == math.inf else f"/{int(trainer.num_training_batches)}"
    return f"batch {batches_done(trainer)}{whole}"
