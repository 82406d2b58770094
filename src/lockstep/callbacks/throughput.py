"""Images/s, step seconds, data wait, slowest and fastest rank, and MFU; no host-device synchronisation of its own.

Every optimizer step is timed end to end: on a GPU by events that are read once they have passed, elsewhere by the
clock. The ranks are compared once an epoch.
"""

import importlib
import logging
import socket
import time
from collections.abc import Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import nn

from lockstep.callbacks.hardware_readings import say
from lockstep.callbacks.percentiles import KeptSamples
from lockstep.callbacks.resume_point import ends_step
from lockstep.callbacks.step_times import StepFigures, StepTimes, cuda_events
from lockstep.distributed.json_collectives import gather_json
from lockstep.runs.hooks import ComputesOnSeveral

log = logging.getLogger(__name__)

BUSY_PERCENT = 10  # of a GPU, before this run computes: more is another's work
OWN_CORE = 0.9  # part of a product's time in which this thread must have computed: less, and others had its core
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
DTYPES = {"64": torch.float64, "32": torch.float32, "bf16": torch.bfloat16, "16": torch.float16}


class Throughput(pl.Callback):
    """
    Args:
        global_batch_size: images per optimizer step over all ranks.
        peak_tflops: of one device by dtype ({float32: …, bfloat16: …}), as configs/hardware/ gives it.
        measure_peak: measure it by a matrix product at the start where it is not given (0.2 s). Under load, or
            where the memory is too little for it, there is no MFU.
        warmup_steps: steps that no figure counts; in short runs the first one only.
    """

    def __init__(
        self,
        global_batch_size: int,
        peak_tflops: dict[str, float | None] | None = None,
        measure_peak: bool = True,
        warmup_steps: int = 10,
    ) -> None:
        self.global_batch_size, self.peak_tflops = global_batch_size, peak_tflops
        self.measure_peak = measure_peak
        self.figures = StepFigures(warmup_steps)
        self.steps = StepTimes(self.figures.add)
        self.num_devices = 1
        self.flops_per_image: float | None = None
        self.peak_flops: float | None = None
        self.ranks: list[dict[str, Any]] = []

    def setup(self, trainer: pl.Trainer, module: pl.LightningModule, stage: str) -> None:
        """Before the strategy wraps or shards the net."""
        data: Any = getattr(trainer, "datamodule", None)
        if stage == "fit" and self.flops_per_image is None and hasattr(data, "image_size"):
            shape = (data.channels, data.image_size, data.image_size)
            self.flops_per_image = flops_per_image(cast(nn.Module, module.net), shape)

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.num_devices = devices_in_use(trainer.strategy, trainer.world_size)
        self.device = trainer.strategy.root_device
        dtype = DTYPES[trainer.precision.split("-")[0]]
        given = _given_peak(self.peak_tflops or {}, dtype)
        if given is not None:
            self.peak_flops = given * 1e12
        elif self.measure_peak and self.flops_per_image:
            self.peak_flops = undisturbed_flops(self.device, dtype)
        self.steps = StepTimes(self.figures.add, cuda_events if self.device.type == "cuda" else None)

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.steps.pause()

    def on_validation_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.steps.pause()

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.steps.pause()

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.pause()

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self.steps.batch_arrived()

    def on_before_backward(self, trainer: pl.Trainer, module: pl.LightningModule, loss: torch.Tensor) -> None:
        self.steps.forward_done()

    def on_train_batch_end(self, trainer, module, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.batch_done(stepped=ends_step(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._compare_ranks(trainer)

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.steps.collect(wait=True)

    def record_fields(self) -> dict[str, object]:
        """`throughput`, and `images_per_s` at the top; nothing before a step was timed."""
        kept = self.figures.sums()
        if not kept.count:
            return {}
        images_per_s = kept.count * self.global_batch_size / kept.seconds
        per_device = images_per_s / self.num_devices
        fields = {
            "images_per_s": round(images_per_s, 2),
            "images_per_s_per_device": round(per_device, 2),
            "step_seconds": _step_seconds(kept.wholes, kept.seconds / kept.count),
            "data_wait_share": round(min(kept.waits / kept.seconds, 1.0), 4),
            "mfu": None,
            "gflops_per_image": round(self.flops_per_image / 1e9, 4) if self.flops_per_image else None,
            "peak_tflops": round(self.peak_flops / 1e12, 3) if self.peak_flops else None,
        }
        if self.flops_per_image and self.peak_flops:
            used = self.flops_per_image * per_device / self.peak_flops
            fields["mfu"] = round(used, 4) if used <= 1 else None  # else others slowed the measurement of the peak
        if self.ranks:
            by_time = sorted(self.ranks, key=lambda rank: rank["own_seconds"])
            fields["fastest_rank"], fields["slowest_rank"] = by_time[0], by_time[-1]
        return {"throughput": fields, "images_per_s": fields["images_per_s"]}

    def _compare_ranks(self, trainer: pl.Trainer) -> None:
        """A collective. Own seconds: waiting for data and computing forward, before ranks wait for each other."""
        own = sorted(self.figures.sums().owns.values)
        mine = {
            "rank": trainer.global_rank,
            "host": socket.gethostname(),
            "own_seconds": round(own[len(own) // 2], 6) if own else 0.0,
        }
        self.ranks = gather_json(mine)


def devices_in_use(strategy: Any, world_size: int) -> int:
    """Of all ranks. A strategy of one process may compute on several: the stages of a net, or copies of it."""
    return len(set(strategy.process_devices)) if isinstance(strategy, ComputesOnSeveral) else world_size


def flops_per_image(net: nn.Module, shape: tuple[int, int, int]) -> float | None:
    """Floating-point operations of forward and backward for one image, counted without computing anything.

    Runs the net on the meta device; its weights, buffers and the random state stay as they are. None where the net
    cannot run there.
    """
    counting = {torch.ops.aten.convolution_backward: convolution_backward_flops}
    counter = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(
        display=False, custom_mapping=counting
    )
    held = {name: _meta(value, True) for name, value in net.named_parameters()}
    held |= {name: _meta(value, False) for name, value in net.named_buffers()}
    batch = 2  # BatchNorm wants more than one
    try:
        with counter, torch.random.fork_rng(devices=[]):
            logits = torch.func.functional_call(net, held, (torch.empty(batch, *shape, device="meta"),))
            logits.sum().backward()
    except Exception as error:  # a net that reads values, or an operation without a meta form
        say(f"no MFU: the net's operations cannot be counted ({type(error).__name__}: {error})")
        return None
    return counter.get_total_flops() / batch


def convolution_backward_flops(
    gradient: torch.Size, images: torch.Size, weight: torch.Size, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, wanted: Sequence[bool], **_: Any,
) -> int:  # fmt: skip
    """As many for each gradient as forward has; torch's own count takes every group's channels for all of them.

    Args:
        gradient, images, weight: shapes.
        wanted: whether the gradients of images, weight and bias are asked for.
    """
    forward = importlib.import_module("torch.utils.flop_counter").conv_flop_count
    return forward(images, weight, gradient, transposed) * sum(wanted[:2])


def undisturbed_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What measured_flops finds; None where it would be noise (verbose=true says so) or cannot be measured."""
    try:
        if device.type == "cuda" and (busy := _utilisation(device)) > BUSY_PERCENT:
            log.debug(f"no MFU: {device} is {busy} % busy with other work; hardware=… gives its peak")
        elif (found := measured_flops(device, dtype)) is not None:
            return found
        else:
            log.debug("no MFU: the cores are busy with other work; hardware=… gives their peak")
    except torch.OutOfMemoryError:
        say(f"no MFU: too little memory is free on {device} to measure its peak; hardware=… gives it")
    return None


def _utilisation(device: torch.device) -> int:
    """Percent; 0 where NVML does not say, as of a part of a GPU."""
    try:
        return torch.cuda.utilization(device)
    except Exception as error:  # NVML raises its own family of errors
        log.debug(f"{device}: its utilisation is not known ({error})")
        return 0


def measured_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float | None:
    """Operations per second of a large matrix product, the best of several.

    None where other work had the cores of a CPU in each of them.
    """
    size = MATMUL_SIZE.get(device.type, 1024)
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(size, size, device=device, generator=generator).to(dtype)
    best, until = 0.0, time.perf_counter() + seconds
    last = False
    while not last:
        last = time.perf_counter() >= until
        _synchronize(device)
        started, own_started = time.perf_counter(), time.thread_time()
        torch.mm(a, a)
        _synchronize(device)
        took, own = time.perf_counter() - started, time.thread_time() - own_started
        if device.type != "cpu" or own > OWN_CORE * took:
            best = max(best, 2 * size**3 / took)
    return best or None


def _given_peak(peaks: dict[str, float | None], dtype: torch.dtype) -> float | None:
    name = str(dtype).removeprefix("torch.")
    if name == "float32" and torch.get_float32_matmul_precision() != "highest" and peaks.get("tf32"):
        return peaks["tf32"]
    return peaks.get(name)


def _step_seconds(samples: KeptSamples, mean: float) -> dict[str, float]:
    ordered = sorted(samples.values)
    last = len(ordered) - 1
    values = {"p50": ordered[last // 2], "p95": ordered[int(0.95 * last)], "mean": mean}
    return {name: round(value, 6) for name, value in values.items()}


def _meta(value: torch.Tensor, trainable: bool) -> torch.Tensor:
    meta = torch.empty_like(value, device="meta")
    return meta.requires_grad_(value.requires_grad) if trainable else meta


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
