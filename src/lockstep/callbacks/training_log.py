"""Writes loss, learning rate and images/s to every logger at log points, and ends a run whose loss is not finite.

`time_s` counts the seconds of all starts of a run, without the time between them and without steps that were lost.

The only host-device synchronisation and the only collective of the training loop are here, once in
`log_every_n_steps` steps.
"""

import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lockstep.callbacks.metrics_csv import read_rows
from lockstep.callbacks.resume_point import ends_epoch, ends_step
from lockstep.runs.errors import Diverged


class TrainingLog(Callback):
    """
    Args:
        global_batch_size: images per optimizer step over all ranks.
    """

    def __init__(self, global_batch_size: int) -> None:
        self.global_batch_size = global_batch_size
        self.started_at = time.monotonic()
        self.seconds_before = 0.0  # of earlier starts of this run
        self.latest: dict[str, float] = {}  # what the progress line shows

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            paths = [logger.path for logger in trainer.loggers if logger.name == "csv" and hasattr(logger, "path")]
            self.seconds_before = max(map(last_time_s, paths), default=0.0)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._mark(trainer)

    def _mark(self, trainer: pl.Trainer) -> None:
        self.marked_at, self.marked_step = time.monotonic(), trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        step, epoch_ends = trainer.global_step, ends_epoch(trainer)
        is_point = epoch_ends or (step % trainer.log_every_n_steps == 0 and ends_step(trainer))
        if step > self.marked_step and (is_point or self._ends_here(trainer)):
            self._log(trainer, pl_module, step, epoch_ends)

    @staticmethod
    def _ends_here(trainer: pl.Trainer) -> bool:
        """In the middle of an epoch. All ranks stop at the same batch: a log point is a collective.

        A swarm (one rank) may be done between two steps of this peer, which has seen less than an epoch by then.
        """
        return trainer.global_step == trainer.max_steps or trainer.should_stop

    def _log(self, trainer: pl.Trainer, module: Any, step: int, epoch_ends: bool) -> None:
        loss, accuracy = self._means(trainer, module, epoch_ends)
        elapsed = time.monotonic() - self.marked_at
        group = trainer.optimizers[0].param_groups[0]
        self.latest = {
            "train/loss": loss,
            "lr": group["lr"] / group.get("lr_scale", 1.0),  # the optimizer's, not that of one layer
            "images_per_s": (step - self.marked_step) * self.global_batch_size / max(elapsed, 1e-9),
        }
        if accuracy is not None:
            self.latest["train/acc"] = accuracy
        self._mark(trainer)
        if not math.isfinite(loss):
            raise Diverged(
                f"train/loss became {loss} by step {step}: lower optimizer.lr or set trainer.gradient_clip_val"
            )
        self._write(trainer, self.latest, step)

    @staticmethod
    def _means(trainer: pl.Trainer, module: Any, epoch_ends: bool) -> tuple[float, float | None]:
        """The loss since the last log point, and at an epoch's end its accuracy, as the images were seen: augmented."""
        total, number = module.take_loss_sum()
        count = torch.full_like(total, number, dtype=torch.float64)  # torch.tensor would wait for the device
        sums = [total.double(), count]
        if epoch_ends and hasattr(module, "take_train_counts"):
            sums += module.take_train_counts().double().unbind()
        total, number, *counts = trainer.strategy.reduce(torch.stack(sums), reduce_op="sum").tolist()
        return total / max(number, 1), counts[0] / counts[1] if counts and counts[1] else None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._write(trainer, self._evaluated(trainer, "val/"), trainer.global_step)
            if not ends_epoch(trainer):
                self.on_train_epoch_end(trainer, pl_module)
        self._mark(trainer)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        values = self._evaluated(trainer, "test/")
        self.tested = values

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Also after a validation within an epoch: a run that is killed later has its row."""
        for logger in trainer.loggers:
            getattr(logger, "end_row", logger.save)()

    @staticmethod
    def _evaluated(trainer: pl.Trainer, prefix: str) -> dict[str, float]:
        return {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}

    def _write(self, trainer: pl.Trainer, values: dict[str, float], step: int) -> None:
        seconds = self.seconds_before + time.monotonic() - self.started_at
        place = {"epoch": trainer.current_epoch, "time_s": round(seconds, 3)}
        for logger in trainer.loggers:
            logger.log_metrics({**place, **values}, step)


def last_time_s(path: Path) -> float:
    """The newest `time_s` of a metrics.csv; 0 where there is none."""
    try:
        rows = read_rows(path)[1]
    except OSError:
        return 0.0
    return max((seconds for row in rows if (seconds := _seconds(row.get("time_s"))) is not None), default=0.0)


def _seconds(cell: str | None) -> float | None:
    try:
        seconds = float(cell or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
