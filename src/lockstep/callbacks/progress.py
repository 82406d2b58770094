"""A bar with epoch, images/s, loss and validation accuracy on a terminal; elsewhere a line for each validation.

Epochs of a few seconds are summed up, and a long one has lines within it.
"""

import logging
import sys
import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.resume_point import ends_epoch
from lockstep.callbacks.training_log import TrainingLog

log = logging.getLogger(__name__)


class Progress(Callback):
    """
    Args:
        interval_s: seconds between two lines within an epoch or an evaluation, where there is no terminal.
        short_epoch_s: an epoch (or the part of it up to a validation) that takes less has a line only if none was
            written for summed_up_s.
    """

    def __init__(self, interval_s: float = 30.0, short_epoch_s: float = 5.0, summed_up_s: float = 20.0) -> None:
        self.interval_s, self.short_epoch_s, self.summed_up_s = interval_s, short_epoch_s, summed_up_s
        self.epoch_began_at = time.monotonic()
        self.bar: Any = None
        self.spoken_at = time.monotonic()
        self.shown_at = 0.0
        self.waited_since = time.monotonic()  # in an evaluation

    def _latest(self, trainer: pl.Trainer) -> dict[str, float]:
        latest = next((c.latest for c in trainer.callbacks if isinstance(c, TrainingLog)), {})
        accuracy = trainer.callback_metrics.get("val/acc")
        return latest if accuracy is None else {**latest, "val/acc": float(accuracy)}

    @staticmethod
    def _words(latest: dict[str, float]) -> str:
        forms = {"train/loss": "loss {:.4f}", "val/acc": "val acc {:.2%}", "images_per_s": "{:,.0f} images/s"}
        return " · ".join(form.format(latest[name]) for name, form in forms.items() if name in latest)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.is_global_zero or not sys.stdout.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[words]}"), refresh_per_second=4,
        )  # fmt: skip
        self.bar.start()
        self.task = self.bar.add_task("epoch", total=int(trainer.num_training_batches), words="")

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epoch_began_at = time.monotonic()
        if self.bar:
            self.bar.reset(self.task, description=f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if self.bar and now - self.shown_at > 0.2:
            self.shown_at = now
            self.bar.update(self.task, completed=batch_idx + 1, words=self._words(self._latest(trainer)))
        elif not self.bar and trainer.is_global_zero and now - self.spoken_at > self.interval_s:
            self._line(trainer, self._place(trainer))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.waited_since = time.monotonic()

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._evaluated(trainer, f"validating {batch_idx + 1}/{sum(trainer.num_val_batches):g}")

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        self._evaluated(trainer, f"testing {batch_idx + 1}/{sum(trainer.num_test_batches):g}")

    def _evaluated(self, trainer: pl.Trainer, place: str) -> None:
        now = time.monotonic()
        if self.bar and now - self.shown_at > 0.2:
            self.shown_at = now
            self.bar.update(self.task, words=place)
        elif not self.bar and trainer.is_global_zero and now - self.waited_since > self.interval_s:
            self.waited_since = now
            log.info(place)

    @staticmethod
    def _place(trainer: pl.Trainer) -> str:
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return f"batch {batches}/{int(trainer.num_training_batches)}"

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Within an epoch."""
        in_fit = trainer.state.fn == "fit" and not trainer.sanity_checking
        is_long = time.monotonic() - self.spoken_at > self.short_epoch_s
        if in_fit and not self.bar and trainer.is_global_zero and not ends_epoch(trainer) and is_long:
            self._line(trainer, f"{self._place(trainer)} · validated")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.bar and trainer.is_global_zero:
            now, last = time.monotonic(), trainer.should_stop or trainer.current_epoch + 1 == trainer.max_epochs
            is_long = now - self.epoch_began_at > self.short_epoch_s
            if last or is_long or now - self.spoken_at > self.summed_up_s:
                self._line(trainer, "done" if ends_epoch(trainer) else self._place(trainer))

    def _line(self, trainer: pl.Trainer, place: str) -> None:
        self.spoken_at = time.monotonic()
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        log.info(" · ".join(filter(None, (epoch, place, self._words(self._latest(trainer))))))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()
        if trainer.is_global_zero and sys.stdout.isatty():
            log.info(f"trained {trainer.current_epoch} epochs · {self._words(self._latest(trainer))}")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None
