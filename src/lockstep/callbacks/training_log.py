"""Loss, learning rate, images per second and validation metrics for every logger, at common log points.

A log point is every `log_every_n_steps` optimizer steps and at an epoch's end. Between two of them losses add up on
the device, and nothing waits for it.
"""

import contextlib
import logging
import math
import re
import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.callbacks.resume_point import ends_epoch, ends_step
from lockstep.runs.errors import Diverged, UserError

log = logging.getLogger(__name__)

# Dense TFLOPS of a GPU by its data sheet: float32, TF32, float16, bfloat16; the first name that fits counts.
PEAK_TFLOPS: dict[str, tuple[float, float | None, float, float | None]] = {
    "H100 PCIe": (51.2, 378, 756, 756), "H[12]00": (66.9, 495, 989, 989), "A100": (19.5, 156, 312, 312),
    "A10G": (31.5, 35, 70, 70), "L4": (30.3, 60, 121, 121), "V100": (15.7, None, 125, None),
    "T4": (8.1, None, 65, None),
}  # fmt: skip


class TrainingLog(Callback):
    """Log what a step returns as its loss, and the speed; end the run if the loss becomes nan or inf.

    Args:
        global_batch_size: images per optimizer step over all ranks; None: taken from the first batch.
        peak_tflops: dense peak of one device at the run's precision; None: looked up by the GPU's name.
    """

    def __init__(self, global_batch_size: int | None = None, peak_tflops: float | None = None) -> None:
        self.global_batch_size, self.peak_tflops = global_batch_size, peak_tflops
        self.started_at, self.seconds_before = time.monotonic(), 0.0  # and seconds in earlier starts of this run
        self.latest: dict[str, float] = {}  # for the progress line and the record
        self.step = 0  # optimizer steps: one for all optimizers of a batch
        self.loss_sum: torch.Tensor | None = None  # of this rank's micro-batches since the last log point
        self.num_losses = 0
        self.spans: list[tuple[int, float, float]] = []  # steps, seconds, seconds of waiting for data
        self.num_devices, self.flops_per_image = 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the losses of all ranks since the last log point; a collective."""
        if self.loss_sum is not None:
            sums = torch.stack([self.loss_sum, torch.full_like(self.loss_sum, self.num_losses)])
            checkpoint["train_losses"] = trainer.strategy.reduce(sums, reduce_op="sum").tolist()

    def on_load_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        if "train_losses" in checkpoint and trainer.is_global_zero:
            total, number = checkpoint["train_losses"]
            self.loss_sum = torch.tensor(total, dtype=torch.float64, device=trainer.strategy.root_device)
            self.num_losses = int(number)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Count the operations before the strategy wraps or shards the net."""
        data, net = getattr(trainer, "datamodule", None), getattr(pl_module, "net", None)
        if stage == "fit" and isinstance(net, nn.Module) and hasattr(data, "image_size"):
            self.flops_per_image = flops_per_image(net, (data.channels, data.image_size, data.image_size))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            with contextlib.suppress(LookupError, ValueError):  # no row, or one that was cut short
                self.seconds_before = float(getattr(logger, "rows", [])[-1]["time_s"])
        # A process of DataParallel or of a pipeline computes on several devices.
        self.num_devices = len(set(getattr(trainer.strategy, "process_devices", ()))) or trainer.world_size
        if self.peak_tflops is None and (device := trainer.strategy.root_device).type == "cuda":
            self.peak_tflops = peak_tflops(torch.cuda.get_device_name(device), trainer.precision)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.step = self.first_step = self.step or trainer.global_step  # version 1 saved no step of ours
        check_eps(trainer)
        self._mark()

    def _mark(self, *_: Any) -> None:
        """Begin to measure; the first batch to come is not waited for."""
        self.marked_at, self.marked_step, self.wait_s, self.batch_ended_at = time.monotonic(), self.step, 0.0, 0.0

    on_train_epoch_start = _mark

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        now = time.monotonic()
        if self.batch_ended_at:
            self.wait_s += now - self.batch_ended_at
        else:
            self.marked_at = now

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.global_batch_size is None:
            self.global_batch_size = extract_batch_size(batch) * trainer.world_size * trainer.accumulate_grad_batches
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            accumulated = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            loss = outputs["loss"].detach().double() * accumulated  # Lightning has divided it
            self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss
            self.num_losses += 1
        self.step += ends_step(trainer)
        epoch_ends, done = ends_epoch(trainer), trainer.global_step == trainer.max_steps or trainer.should_stop
        is_point = epoch_ends or done or (self.step % trainer.log_every_n_steps == 0 and ends_step(trainer))
        if is_point and self.step > self.marked_step:  # all ranks reach it at the same batch: it is a collective
            self._log(trainer, pl_module, epoch_ends)
        elif self.step == self.first_step + 1 and ends_step(trainer):
            self._mark()  # the first step also warms up, and counts in no speed
        self.batch_ended_at = time.monotonic()

    def _log(self, trainer: pl.Trainer, module: Any, epoch_ends: bool) -> None:
        self.latest = self._means(trainer, module, epoch_ends)  # waits for the device
        steps, seconds = self.step - self.marked_step, time.monotonic() - self.marked_at
        self.latest["images_per_s"] = steps * (self.global_batch_size or 0) / seconds
        if self.step > self.first_step + 1:
            self.spans.append((steps, seconds, self.wait_s))
        for group in trainer.optimizers[0].param_groups[:1] if trainer.optimizers else ():
            self.latest["lr"] = group["lr"] / group.get("lr_scale", 1.0)  # the optimizer's, not that of one layer
        if not math.isfinite(loss := self.latest.get("train/loss", 0.0)):
            raise Diverged(
                f"train/loss became {loss} by step {self.step}: lower optimizer.lr or set trainer.gradient_clip_val"
            )
        devices = (callback.latest_means() for callback in trainer.callbacks if hasattr(callback, "latest_means"))
        self._write(trainer, self.latest | {name: value for means in devices for name, value in means.items()})
        self._mark()

    def _means(self, trainer: pl.Trainer, module: Any, epoch_ends: bool) -> dict[str, float]:
        """The mean loss since the last log point, and at an epoch's end the accuracy on the images as augmented."""
        zero = torch.zeros((), dtype=torch.float64, device=trainer.strategy.root_device)
        sums = [zero if self.loss_sum is None else self.loss_sum, torch.full_like(zero, self.num_losses)]
        self.loss_sum, self.num_losses = None, 0
        if epoch_ends and hasattr(module, "take_train_counts"):
            sums += module.take_train_counts().double().unbind()
        total, number, *counts = trainer.strategy.reduce(torch.stack(sums), reduce_op="sum").tolist()
        means = {"train/loss": total / number} if number else {}
        return {**means, "train/acc": counts[0] / counts[1]} if counts and counts[1] else means

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self._write(trainer, {name: value for name, value in metrics.items() if name.startswith("val/")})
            if not ends_epoch(trainer):  # a run that is killed later has its row
                self.on_train_epoch_end(trainer, pl_module)
        self._mark()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            logger.save()

    def _write(self, trainer: pl.Trainer, values: dict[str, float]) -> None:
        seconds = self.seconds_before + time.monotonic() - self.started_at
        for logger in trainer.loggers:
            logger.log_metrics({"epoch": trainer.current_epoch, "time_s": round(seconds, 3), **values}, self.step)

    def record_fields(self) -> dict[str, object]:
        """Return `throughput` and `images_per_s` of this start, or nothing before its second log point."""
        if not self.spans or self.global_batch_size is None:
            return {}
        steps, seconds, waits = np.array(self.spans).T
        per_device = float(self.global_batch_size * steps.sum() / seconds.sum() / self.num_devices)
        used_tflops = per_device * self.flops_per_image / 1e12
        p50, p95 = np.percentile(seconds / steps, (50, 95))
        images_per_s = round(per_device * self.num_devices, 2)
        fields = {
            "images_per_s": images_per_s,
            "images_per_s_per_device": round(per_device, 2),
            "step_seconds": {
                "p50": round(p50, 6), "p95": round(p95, 6), "mean": round(seconds.sum() / steps.sum(), 6),
            },
            "data_wait_share": round(min(waits.sum() / seconds.sum(), 1.0), 4),
            "mfu": round(used_tflops / self.peak_tflops, 4) if used_tflops and self.peak_tflops else None,
            "gflops_per_image": round(self.flops_per_image / 1e9, 4) or None,
            "peak_tflops": self.peak_tflops,
        }  # fmt: skip
        return {"throughput": fields, "images_per_s": images_per_s}


class ValidationInterval(Callback):
    """Validate within an epoch and at its end, which Lightning omits if the interval does not divide it.

    Args:
        batches: micro-batches from one validation to the next, counted in each epoch anew.
    """

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.val_check_batch = trainer.num_training_batches if ends_epoch(trainer) else self.batches

    on_train_batch_end = on_train_start


def check_eps(trainer: pl.Trainer) -> None:
    """Refuse an optimizer that divides by an eps which float16 rounds to 0.

    Raises:
        UserError: names the option and the precisions that work.
    """
    for group in [group for optimizer in trainer.optimizers for group in optimizer.param_groups]:
        eps = group.get("eps")
        if trainer.precision == "16-true" and isinstance(eps, float) and torch.tensor(eps, dtype=torch.float16) == 0:
            raise UserError(
                f"optimizer.eps={eps:g} is 0 under trainer.precision=16-true, and updates divide by it: give "
                "optimizer.eps=1e-4, or trainer.precision=16-mixed, bf16-mixed, bf16-true or 32-true."
            )


def flops_per_image(net: nn.Module, shape: tuple[int, int, int]) -> int:
    """Return the floating-point operations of training on one image: three times those of its forward.

    Runs the forward on the meta device, so nothing is computed and no weight or random state changes. 0 if the net
    cannot run there.
    """
    state = {name: torch.empty_like(value, device="meta") for name, value in net.state_dict(keep_vars=True).items()}
    images = torch.empty(2, *shape, device="meta")  # two: BatchNorm refuses one
    try:
        with FlopCounterMode(display=False) as counter, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.func.functional_call(net, state, (images,))
    except Exception as error:  # a net that reads values, or an operation without a meta kernel
        log.info(f"no MFU: the operations of the net cannot be counted ({type(error).__name__}: {error})")
        return 0
    return 3 * counter.get_total_flops() // len(images)


def peak_tflops(gpu: str, precision: str | int) -> float | None:
    """Return the dense peak of a GPU by its name; None if the table does not know it."""
    peaks = (peaks for name, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", gpu))
    float32, tf32, float16, bfloat16 = next(peaks, (None, None, None, None))
    full = tf32 if tf32 and torch.get_float32_matmul_precision() != "highest" else float32
    return {"16": float16, "bf16": bfloat16}.get(str(precision).split("-")[0], full)
