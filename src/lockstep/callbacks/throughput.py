"""Images per second, time and data wait per optimizer step, and model FLOPs utilisation (MFU).

On a GPU steps are timed by CUDA events that are read once they have passed: no step waits for the device.
"""

import logging
import re
import time
from array import array
from collections import deque
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.callbacks.resume_point import ends_step

log = logging.getLogger(__name__)

WARMUP_STEPS = 10  # left out of all figures; in a shorter run only the first step is
# Dense TFLOPS of a GPU by its data sheet: float32, TF32, float16, bfloat16; the first name that fits counts.
PEAK_TFLOPS: dict[str, tuple[float, float | None, float, float | None]] = {
    "H100 PCIe": (51.2, 378, 756, 756), "H[12]00": (66.9, 495, 989, 989), "A100": (19.5, 156, 312, 312),
    "A10G": (31.5, 35, 70, 70), "L4": (30.3, 60, 121, 121), "V100": (15.7, None, 125, None),
    "T4": (8.1, None, 65, None),
}  # fmt: skip


class Throughput(pl.Callback):
    """
    Args:
        global_batch_size: images per optimizer step over all ranks; None: taken from the first batch.
        peak_tflops: dense peak of one device at the run's precision; None: looked up by the GPU's name.
    """

    def __init__(self, global_batch_size: int | None = None, peak_tflops: float | None = None) -> None:
        self.global_batch_size, self.peak_tflops = global_batch_size, peak_tflops
        self.times, self.waits = array("f"), array("f")  # seconds of each optimizer step
        self.pending: deque[tuple[Any, Any, float]] = deque()  # start and end of steps whose events have not passed
        self.flops_per_image: float | None = None
        self.num_devices, self.on_gpu = 1, False
        self._pause()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Count the operations before the strategy wraps or shards the net."""
        data, net = getattr(trainer, "datamodule", None), getattr(pl_module, "net", None)
        if stage == "fit" and self.flops_per_image is None and net is not None and hasattr(data, "image_size"):
            self.flops_per_image = flops_per_image(net, (data.channels, data.image_size, data.image_size))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.num_devices = devices_in_use(trainer.strategy, trainer.world_size)
        self.on_gpu = trainer.strategy.root_device.type == "cuda"
        if self.on_gpu and self.peak_tflops is None:
            name = torch.cuda.get_device_name(trainer.strategy.root_device)
            self.peak_tflops = peak_tflops(name, trainer.precision)

    def _pause(self, *_: Any) -> None:
        """Leave out the time until the next batch: validation, checkpoints and the start of an epoch."""
        self.start: Any = None
        self.batch_ended_at, self.wait_s = 0.0, 0.0

    on_train_epoch_start = on_validation_start = on_validation_end = on_save_checkpoint = _pause

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.start is None:
            self.start = self._mark()
        else:
            self.wait_s += time.perf_counter() - self.batch_ended_at
        if self.global_batch_size is None:
            self.global_batch_size = extract_batch_size(batch) * trainer.world_size * trainer.accumulate_grad_batches

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batch_ended_at = time.perf_counter()
        if self.start is not None and ends_step(trainer):
            self.pending.append((self.start, end := self._mark(), self.wait_s))
            self.start, self.wait_s = end, 0.0
            while self.pending and (not self.on_gpu or self.pending[0][1].query()):
                self._take()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        while self.pending:
            if self.on_gpu:
                self.pending[0][1].synchronize()
            self._take()

    def record_fields(self) -> dict[str, object]:
        """Return `throughput` and `images_per_s`, or nothing before a step was timed."""
        skipped = WARMUP_STEPS if len(self.times) > 2 * WARMUP_STEPS else 1
        times, waits = np.array(self.times[skipped:]), np.array(self.waits[skipped:])
        if not len(times) or self.global_batch_size is None:
            return {}
        mean, (p50, p95) = float(times.mean()), np.percentile(times, (50, 95)).tolist()
        images_per_s = self.global_batch_size / mean
        per_device = images_per_s / self.num_devices
        used_tflops = per_device * (self.flops_per_image or 0.0) / 1e12
        fields = {
            "images_per_s": round(images_per_s, 2),
            "images_per_s_per_device": round(per_device, 2),
            "step_seconds": {"p50": round(p50, 6), "p95": round(p95, 6), "mean": round(mean, 6)},
            "data_wait_share": round(min(float(waits.sum() / times.sum()), 1.0), 4),
            "mfu": round(used_tflops / self.peak_tflops, 4) if used_tflops and self.peak_tflops else None,
            "gflops_per_image": round(self.flops_per_image / 1e9, 4) if self.flops_per_image else None,
            "peak_tflops": self.peak_tflops,
        }
        return {"throughput": fields, "images_per_s": fields["images_per_s"]}

    def _mark(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _take(self) -> None:
        start, end, wait_s = self.pending.popleft()
        self.times.append(start.elapsed_time(end) / 1000 if self.on_gpu else end - start)
        self.waits.append(wait_s)


def devices_in_use(strategy: Any, world_size: int) -> int:
    """Return the number of devices of all ranks; a process of DataParallel or of a pipeline computes on several."""
    return len(set(getattr(strategy, "process_devices", ()))) or world_size


def flops_per_image(net: nn.Module, shape: tuple[int, int, int]) -> float | None:
    """Return the floating-point operations of training on one image: three times those of its forward.

    Runs the forward on the meta device, so nothing is computed and no weight or random state changes. None if the net
    cannot run there.
    """
    state = {name: torch.empty_like(value, device="meta") for name, value in net.state_dict(keep_vars=True).items()}
    images = torch.empty(2, *shape, device="meta")  # two: BatchNorm refuses one
    try:
        with FlopCounterMode(display=False) as counter, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.func.functional_call(net, state, (images,))
    except Exception as error:  # a net that reads values, or an operation without a meta kernel
        log.info(f"no MFU: the operations of the net cannot be counted ({type(error).__name__}: {error})")
        return None
    return 3 * counter.get_total_flops() / len(images)


def peak_tflops(gpu: str, precision: str | int) -> float | None:
    """Return the dense peak of a GPU by its name; None if the table does not know it."""
    peaks = (peaks for name, peaks in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", gpu))
    float32, tf32, float16, bfloat16 = next(peaks, (None, None, None, None))
    full = tf32 if tf32 and torch.get_float32_matmul_precision() != "highest" else float32
    return {"16": float16, "bf16": bfloat16}.get(str(precision).split("-")[0], full)
