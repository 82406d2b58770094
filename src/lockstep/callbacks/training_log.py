"""Loss, learning rate, images per second and validation metrics for every logger, at common log points.

A log point is every `log_every_n_steps` optimizer steps and at an epoch's end. Between two of them losses add up on
the device, and nothing waits for it.
"""

import math
import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.data import extract_batch_size

from lockstep.callbacks.metrics_csv import MetricsCsv
from lockstep.callbacks.resume_point import ends_epoch, ends_step, steps_are_over
from lockstep.ranks.collectives import gather_for_checkpoint
from lockstep.runs.errors import Diverged, UserError


class TrainingLog(pl.Callback):
    """Log what a step returns as its loss, and the speed; end the run if the loss becomes nan or inf.

    `global_batch_size` is in images per optimizer step over all ranks; None: taken from the first batch.
    """

    def __init__(self, global_batch_size: int | None = None) -> None:
        self.global_batch_size = global_batch_size
        self.trainer: pl.Trainer | None = None  # set when a training starts
        self.started_at, self.seconds_before = time.monotonic(), 0.0  # and seconds in earlier starts of this run
        self.latest: dict[str, float] = {}  # for the progress line and the record
        self.step = self.first_step = 0  # optimizer steps: one for all optimizers of a batch
        self.losses: Any = (0.0, 0)  # of this rank's micro-batches since the last log point: their sum and number
        self.spans: list[tuple[int, float, float]] = []  # steps, seconds, seconds of waiting for data

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, and the losses of all ranks since the last log point.

        A collective unless fit has failed.
        """
        of_rank = (float(self.losses[0]), self.losses[1])
        sums, numbers = zip(*gather_for_checkpoint(of_rank, self.trainer), strict=True)
        return {"step": self.step, "seconds": self._seconds(), "losses": [sum(sums), sum(numbers)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.seconds_before = state_dict["step"], state_dict.get("seconds", 0.0)
        if rank_zero_only.rank == 0:
            self.losses = state_dict.get("losses", (0.0, 0))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trainer = trainer
        # A process of DataParallel or of a pipeline computes on several devices.
        self.num_devices = len(set(getattr(trainer.strategy, "process_devices", ()))) or trainer.world_size
        self.step = self.first_step = self.step or trainer.global_step  # version 1 saved no step of ours
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCsv):
                logger.begin_at(self.step)
        check_eps(trainer)
        self._mark()

    def _mark(self, *_: Any) -> None:
        """Start to measure; the wait for the first batch does not count."""
        self.marked_at, self.marked_step, self.wait_s, self.batch_ended_at = time.monotonic(), self.step, 0.0, 0.0

    on_train_epoch_start = _mark

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if self.batch_ended_at:
            self.wait_s += now - self.batch_ended_at
        else:
            self.marked_at = now

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_batch_size is None:
            self.global_batch_size = extract_batch_size(batch) * trainer.world_size * trainer.accumulate_grad_batches
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            divided_by = trainer.accumulate_grad_batches if module.automatic_optimization else 1  # by Lightning
            self.losses = self.losses[0] + outputs["loss"].detach().double() * divided_by, self.losses[1] + 1
        is_step_end, epoch_ends = ends_step(trainer), ends_epoch(trainer)
        self.step += is_step_end
        is_done = steps_are_over(trainer) or trainer.should_stop
        is_point = epoch_ends or is_done or (is_step_end and self.step % trainer.log_every_n_steps == 0)
        if is_point and self.step > self.marked_step:  # all ranks reach it at the same batch: it is a collective
            self._log(trainer, module, epoch_ends)
        elif self.step == self.first_step + 1 and is_step_end:
            self._mark()  # the first step also warms up, and counts in no speed
        self.batch_ended_at = time.monotonic()

    def _log(self, trainer: pl.Trainer, module: Any, epoch_ends: bool) -> None:
        sums = [torch.as_tensor(each, dtype=torch.float64, device=trainer.strategy.root_device) for each in self.losses]
        total, number = trainer.strategy.reduce(torch.stack(sums), reduce_op="sum").tolist()  # waits for the device
        self.losses = 0.0, 0
        self.latest = {"train/loss": total / number} if number else {}
        if epoch_ends and hasattr(module, "epoch_means"):
            self.latest |= module.epoch_means("train")
        steps, seconds = self.step - self.marked_step, time.monotonic() - self.marked_at
        self.latest["images_per_s"] = steps * (self.global_batch_size or 0) / seconds
        if self.step > self.first_step + 1:
            self.spans.append((steps, seconds, self.wait_s))
        for group in trainer.optimizers[0].param_groups[:1] if trainer.optimizers else ():
            self.latest["lr"] = group["lr"] / group.get("lr_scale", 1.0)  # the optimizer's, not that of one layer
        if not math.isfinite(loss := self.latest.get("train/loss", 0.0)):
            cure = "lower optimizer.lr or set trainer.gradient_clip_val"
            raise Diverged(f"train/loss became {loss} by step {self.step}: {cure}")
        devices = (callback.latest_means() for callback in trainer.callbacks if hasattr(callback, "latest_means"))
        self._write(trainer, {**self.latest, **{name: value for means in devices for name, value in means.items()}})
        self._mark()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            metrics = trainer.callback_metrics.items()
            self._write(trainer, {name: float(value) for name, value in metrics if name.startswith("val")})
            if not ends_epoch(trainer):  # a run that is killed later has its row
                self.on_train_epoch_end(trainer, pl_module)
        self._mark()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            logger.save()

    def _write(self, trainer: pl.Trainer, values: dict[str, float]) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch, "time_s": self._seconds(), **values}, self.step)

    def _seconds(self) -> float:
        return round(self.seconds_before + time.monotonic() - self.started_at, 3)

    def record_fields(self) -> dict[str, object]:
        """Return `throughput` and `images_per_s` of this start, or nothing before its second log point."""
        if not self.spans or self.global_batch_size is None:
            return {}
        steps, seconds, waits = np.array(self.spans).T
        mean, (p50, p95) = seconds.sum() / steps.sum(), np.percentile(seconds / steps, (50, 95))
        images_per_s = self.global_batch_size / mean
        throughput = {
            "images_per_s": round(images_per_s, 2),
            "images_per_s_per_device": round(images_per_s / self.num_devices, 2),
            "step_seconds": {"p50": round(p50, 6), "p95": round(p95, 6), "mean": round(mean, 6)},
            "data_wait_share": round(min(waits.sum() / seconds.sum(), 1.0), 4),
        }
        return {"throughput": throughput, "images_per_s": throughput["images_per_s"]}


class ValidationInterval(pl.Callback):
    """Validate after every so many micro-batches of an epoch and at its end, which Lightning may omit."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.val_check_batch = trainer.num_training_batches if ends_epoch(trainer) else self.batches

    on_train_batch_end = on_train_start


def check_eps(trainer: pl.Trainer) -> None:
    """Refuse an optimizer that divides by an eps which float16 rounds to 0."""
    for group in [group for optimizer in trainer.optimizers for group in optimizer.param_groups]:
        eps = group.get("eps")
        if trainer.precision == "16-true" and isinstance(eps, float) and torch.tensor(eps, dtype=torch.float16) == 0:
            raise UserError(
                f"optimizer.eps={eps:g} is 0 under trainer.precision=16-true, and updates divide by it: give "
                "optimizer.eps=1e-4, or trainer.precision=16-mixed, bf16-mixed, bf16-true or 32-true."
            )
