"""Log loss, learning rate, images per second and the metrics of evaluations to every logger.

A log point comes every `log_every_n_steps` optimizer steps and at an epoch's end. Between two log
points the losses are summed on the device, and nothing waits for it.
"""

import logging
import math
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lockstep.callbacks import plateau
from lockstep.callbacks.speed import Speed
from lockstep.checkpoints.resume_point import ends_epoch, ends_step, steps_are_over, stops_now
from lockstep.loggers.metrics_csv import MetricsCsv
from lockstep.process.errors import Diverged, UserError
from lockstep.ranks.collectives import gather_for_checkpoint
from lockstep.records.metric_names import is_metric_of

log = logging.getLogger(__name__)

Metrics = dict[str, float]


class TrainingLog(pl.Callback):
    """Log what a step returns as its loss, and the speed; end the run if the loss is nan or inf.

    Args:
        global_batch_size: images per optimizer step over all ranks; None counts those of the first
            batch.
    """

    def __init__(self, global_batch_size: int | None = None) -> None:
        self.global_batch_size = global_batch_size
        # It is set when a training starts.
        self.trainer: pl.Trainer | None = None
        self.started_at = time.monotonic()
        self.earlier_seconds = 0.0  # in earlier starts of this run
        self.latest_row: Metrics = {}  # for the progress line and the record
        self.step = 0  # optimizer steps: one for all optimizers of a batch
        self.first_step = 0  # at which this start began
        self.lr: Any = None  # of the present step
        self.loss_sum: Any = 0.0  # of this rank's micro-batches since the last log point
        self.loss_count = 0
        # It holds the sum and number of all ranks' losses in this epoch, up to the last log point.
        self.epoch_losses = (0.0, 0)
        self.epoch_means: Metrics = {}  # of the training epoch that has just ended
        self.speed = Speed()
        self.checks_loss = True

    def state_dict(self) -> dict[str, Any]:
        """Return the steps, and the losses of all ranks since the last log point.

        This is a collective unless fit has failed.
        """
        losses_of_rank = (float(self.loss_sum), self.loss_count)
        losses = gather_for_checkpoint(losses_of_rank, self.trainer)
        totals, numbers = zip(*losses, strict=True)
        return {
            "step": self.step,
            "seconds": self._seconds(),
            "losses": [sum(totals), sum(numbers)],
            "epoch_losses": list(self.epoch_losses),
            # A resume in the validation at an epoch's end has no batch from which to count them.
            "epoch_means": self.epoch_means,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        self.earlier_seconds = state_dict.get("seconds", 0.0)
        self.epoch_losses = tuple(state_dict.get("epoch_losses", (0.0, 0)))
        self.epoch_means = state_dict.get("epoch_means", {})
        if rank_zero_only.rank == 0:
            self.loss_sum, self.loss_count = state_dict.get("losses", (0.0, 0))

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trainer = trainer
        plateau.check_before_training(trainer, pl_module)
        # A process of DataParallel or of a pipeline computes on several devices.
        devices = set(getattr(trainer.strategy, "process_devices", ()))
        self.num_devices = max(len(devices), 1) * trainer.world_size
        # A checkpoint that was saved without this callback does not hold its step.
        self.step = self.step or trainer.global_step
        self.first_step = self.step
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCsv):
                logger.begin_at(self.step, drops_partial_means=self.loss_count > 0)
        refuse_small_eps(trainer)
        if trainer.is_global_zero:
            _log_early_end(trainer)
        self.speed.begin_interval(self.step)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.speed.begin_interval(self.step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.speed.start_batch()
        self._read_lr(trainer)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: Any, optimizer: torch.optim.Optimizer
    ) -> None:
        # The module may have set the rate within its step.
        if optimizer is trainer.optimizers[0]:
            self._read_lr(trainer)

    def _read_lr(self, trainer: pl.Trainer) -> None:
        """Keep the learning rate of this step, before a schedule sets the rate of the next step."""
        if not trainer.optimizers or not trainer.optimizers[0].param_groups:
            return
        group = trainer.optimizers[0].param_groups[0]
        if group.get("lr") is None:
            # An optimizer such as Adafactor may choose the rate itself.
            return
        # This is the optimizer's rate, not that of one layer.
        self.lr = group["lr"] / group.get("lr_scale", 1.0)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        module: Any,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self.global_batch_size is None:
            ranks = trainer.world_size * trainer.accumulate_grad_batches
            self.global_batch_size = count_images(batch) * ranks
        self._add_loss(trainer, module, outputs)
        is_step_end = ends_step(trainer)
        if is_step_end:
            self.step += 1

        is_interval_end = is_step_end and self.step % trainer.log_every_n_steps == 0
        is_regular = is_interval_end or ends_epoch(trainer)
        is_final_batch = steps_are_over(trainer) or stops_now(trainer)
        # All ranks reach a log point at the same batch: it is a collective.
        if (is_regular or is_final_batch) and self.step > self.speed.began_step:
            self._log_point(trainer, module, is_regular)
        elif is_step_end and self.step == self.first_step + 1:
            # The first step of a start warms up, so its time does not count.
            self.speed.begin_interval(self.step)
        self.speed.end_batch()

    def _add_loss(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is None:
            return
        loss = loss.detach().double()
        if module.automatic_optimization:
            # Lightning has divided it by the number of micro-batches.
            loss = loss * trainer.accumulate_grad_batches
        self.loss_sum = self.loss_sum + loss
        self.loss_count += 1

    def _log_point(self, trainer: pl.Trainer, module: Any, is_regular: bool) -> None:
        """Write a row, and begin the next interval."""
        total, count = self._reduce_losses(trainer)
        self.latest_row = {"train/loss": total / count} if count else {}
        self._end_loss_interval(trainer, total, count, is_regular)
        if ends_epoch(trainer):
            self.latest_row |= self._end_epoch(module)
        if self.speed.began_step > self.first_step:
            steps_per_s = self.speed.end_interval(self.step)
            if self.global_batch_size:
                self.latest_row["images_per_s"] = steps_per_s * self.global_batch_size
        if self.lr is not None:
            self.latest_row["lr"] = float(self.lr)
        self._refuse_non_finite()
        self._write_row(trainer, self.latest_row | collect_callback_means(trainer))
        self.speed.begin_interval(self.step)

    def _end_epoch(self, module: Any) -> Metrics:
        """Return the means that the module counted in the epoch; keep them with the mean loss."""
        counted_means = {}
        if hasattr(module, "pop_epoch_means"):
            counted_means = module.pop_epoch_means("train")
        total, count = self.epoch_losses
        self.epoch_losses = (0.0, 0)
        self.epoch_means = {"train/loss": total / count} if count else {}
        self.epoch_means |= counted_means
        return counted_means

    def _reduce_losses(self, trainer: pl.Trainer) -> tuple[float, int]:
        """Return the sum and number of all ranks' losses since the last regular log point.

        This is a collective.
        """
        device = trainer.strategy.root_device
        pair = torch.zeros(2, dtype=torch.float64, device=device)
        pair[0] = self.loss_sum
        pair[1] = self.loss_count
        pair = trainer.strategy.reduce(pair, reduce_op="sum")
        # This line waits for the device.
        total, count = pair.tolist()
        return total, int(count)

    def _end_loss_interval(
        self, trainer: pl.Trainer, total: float, count: int, is_regular: bool
    ) -> None:
        """Add the losses of all ranks to those of the epoch, and begin the next interval.

        A stop within an epoch is no regular log point. The losses are kept after it, because the
        next row of a resumed run is the mean over the whole interval, as without the stop.
        """
        self.loss_sum = 0.0
        self.loss_count = 0
        if is_regular:
            self.epoch_losses = (self.epoch_losses[0] + total, self.epoch_losses[1] + count)
        elif trainer.is_global_zero:
            self.loss_sum = total
            self.loss_count = count

    def _refuse_non_finite(self) -> None:
        loss = self.latest_row.get("train/loss", 0.0)
        if self.checks_loss and not math.isfinite(loss):
            raise Diverged(
                f"train/loss became {loss} by step {self.step}: lower optimizer.lr or set "
                "trainer.gradient_clip_val"
            )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            plateau.check_sanity_metrics(trainer, pl_module)
        elif trainer.state.fn == "fit":
            self._write_row(trainer, evaluation_metrics(trainer, "val"))
            if not ends_epoch(trainer):
                save_loggers(trainer)
        self.speed.begin_interval(self.step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if ends_epoch(trainer):
            plateau.log_training_metrics(trainer, pl_module, self.epoch_means)
        save_loggers(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        log_hyperparameters(trainer, self.step)

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the results of a test at the step where training has ended."""
        values = evaluation_metrics(trainer, "test")
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCsv):
                logger.add_to_last_row(values)
            else:
                logger.log_metrics(drop_module_metrics(values, trainer), self.step)
        save_loggers(trainer)

    def _write_row(self, trainer: pl.Trainer, values: Metrics) -> None:
        row = {"epoch": trainer.current_epoch, "time_s": self._seconds(), **values}
        for logger in trainer.loggers:
            if isinstance(logger, MetricsCsv):
                logger.write_row(row, self.step)
            else:
                logger.log_metrics(drop_module_metrics(row, trainer), self.step)

    def _seconds(self) -> float:
        seconds = time.monotonic() - self.started_at
        return round(self.earlier_seconds + seconds, 3)

    def record_fields(self) -> dict[str, object]:
        """Return `throughput` and `images_per_s`, or nothing before the second log point."""
        if not self.speed.steps or not self.global_batch_size:
            return {}
        throughput = self.speed.summary(self.global_batch_size, self.num_devices)
        return {"throughput": throughput, "images_per_s": throughput["images_per_s"]}


def _log_early_end(trainer: pl.Trainer) -> None:
    """Log that max_epochs ends a training before its max_steps."""
    epochs = trainer.max_epochs or -1
    batches = trainer.num_training_batches
    if min(epochs, trainer.max_steps) < 1 or len(trainer.optimizers) > 1 or math.isinf(batches):
        return
    steps = epochs * math.ceil(batches / trainer.accumulate_grad_batches)
    if steps < trainer.max_steps:
        log.warning(
            f"trainer.max_epochs={epochs} ends the training after {steps:,} of "
            f"trainer.max_steps={trainer.max_steps:,} steps: give trainer.max_epochs=null to train "
            "them all."
        )


def count_images(batch: Any) -> int:
    """Return the number of images in a batch; 0 if its class does not tell its size."""
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError):
        return 0


def evaluation_metrics(trainer: pl.Trainer, stage: str) -> Metrics:
    """Return the metrics of an evaluation, whose names begin with val or test."""
    metrics = {}
    for name, value in trainer.callback_metrics.items():
        if is_metric_of(stage, name):
            metrics[name] = float(value)
    return metrics


def drop_module_metrics(values: Metrics, trainer: pl.Trainer) -> Metrics:
    """Return the values whose names the module does not send to the loggers itself."""
    module_metrics = trainer.logged_metrics
    return {name: value for name, value in values.items() if name not in module_metrics}


def log_hyperparameters(trainer: pl.Trainer, step: int) -> None:
    """Show what the module has saved by save_hyperparameters in TensorBoard's HPARAMS tab.

    TensorBoard lists a run there only with a metric. It is the best value of the monitored metric,
    or else the last losses.
    """
    metrics: Metrics = {}
    for callback in trainer.callbacks:
        value = getattr(callback, "best_value", None)
        monitor = getattr(callback, "monitor", None)
        if value is not None and monitor:
            metrics[f"{monitor}_best"] = value
    if not metrics:
        losses = {name: value for name, value in trainer.callback_metrics.items() if "loss" in name}
        metrics = {f"{name}_last": float(value) for name, value in losses.items()}

    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger) and logger.hparams:
            logger.log_hyperparams(logger.hparams, metrics, step)


def collect_callback_means(trainer: pl.Trainer) -> Metrics:
    """Return what callbacks have measured since the last log point."""
    means: Metrics = {}
    for callback in trainer.callbacks:
        if hasattr(callback, "latest_means"):
            means |= callback.latest_means()
    return means


def save_loggers(trainer: pl.Trainer) -> None:
    """Make what was logged so far survive a kill, and in metrics.csv also a power cut."""
    for logger in trainer.loggers:
        if isinstance(logger, MetricsCsv):
            logger.sync()
        else:
            logger.save()


class ValidationInterval(pl.Callback):
    """Validate after every `batches` micro-batches of an epoch, and also at its end.

    Lightning may omit the validation at the end.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if ends_epoch(trainer):
            trainer.val_check_batch = trainer.num_training_batches
        else:
            trainer.val_check_batch = self.batches

    on_train_batch_end = on_train_start


def refuse_small_eps(trainer: pl.Trainer) -> None:
    """Refuse an optimizer that divides by an eps which float16 rounds to 0."""
    if trainer.precision != "16-true":
        return
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            eps = group.get("eps")
            if isinstance(eps, float) and is_zero_in_float16(eps):
                raise UserError(
                    f"optimizer.eps={eps:g} is 0 under trainer.precision=16-true, and updates "
                    "divide by it: give optimizer.eps=1e-4, or trainer.precision=16-mixed, "
                    "bf16-mixed, bf16-true or 32-true."
                )


def is_zero_in_float16(value: float) -> bool:
    return torch.tensor(value, dtype=torch.float16).item() == 0
