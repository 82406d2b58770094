"""Estimate the largest batch without a GPU, by torch's private `_subclasses` and `_tools`.

They run two steps on fake tensors, which have shapes and no contents, and count the bytes.

    python src/find_batch_size.py model=vit trainer=fsdp trainer.num_nodes=8 \\
      trainer.memory_limit_gib=16 --estimate
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lockstep.config.instantiate import resolve_target
from lockstep.process.environment import count_visible_gpus
from lockstep.process.errors import EXIT_OK, UserError
from lockstep.ranks.placement import resolve_devices
from lockstep.records.config import Config
from lockstep.runs.batch_search import GIB, USABLE_SHARE, BatchProbes
from lockstep.strategies.recompute import recompute_activations
from lockstep.training.build_data import build_prepared_data
from lockstep.training.build_module import build_module

log = logging.getLogger(__name__)

# The allocator's gaps and cuDNN's workspaces: 4 % for ViT-B/32, 9 % for ResNet-18
MARGIN = 1.1
# A search ends there where the number of training images is not known.
MAX_IMAGES = 65536
# FSDP gathers two units at a time, and the gradients of one.
GATHERED_UNITS = 3
COUNTED_STRATEGIES = ("DDP", "FSDP", "AllReduce", "")
COUNTED_TASKS = (
    "tasks.classifier.ImageClassifier",
    "tasks.multilabel.MultiLabel",
    "tasks.regression.Regression",
)
TRUE_DTYPES = {
    "bf16-true": torch.bfloat16,
    "16-true": torch.bfloat16,
    "64-true": torch.float64,
}


def estimate(config: Config) -> int:
    """Log the memory of each batch that is tried and the largest one; return the exit code."""
    trainer = config["trainer"]
    strategy = (trainer["strategy"] or {}).get("_target_", "")
    if strategy.rpartition(".")[2] not in COUNTED_STRATEGIES:
        raise UserError(
            "--estimate does not know this trainer: use trainer=gpu, ddp, fsdp or allreduce."
        )
    limit_gib = _device_memory_gib(trainer)
    ranks_per_node, ranks = _count_ranks(config)
    probes = BatchProbes(ranks * trainer["accumulate_grad_batches"], limit_gib=limit_gib)
    probes.bound_by_epoch(_count_images_of_epoch(config))

    while (batch := probes.choose_next()) is not None:
        peak_gib = MARGIN * peak_bytes(config, batch, ranks, ranks_per_node) / GIB
        probes.peaks[batch] = peak_gib
        log.info(f"{batch} images per device: {peak_gib:.3g} of {limit_gib:.3g} GiB")

    largest = probes.find_largest()
    note = "limited by the data set · " if probes.bounded_by == "data set" else ""
    batches = probes.micro_batches_per_step
    factors = f"{largest} × {ranks} × {trainer['accumulate_grad_batches']}"
    log.info(
        f"estimated largest batch {largest} per device, {largest * batches} global = {factors} · "
        f"{note}{probes.peaks[largest]:.3g} of {limit_gib:.3g} GiB, {MARGIN - 1:.0%} of it for the "
        "allocator · nothing was run"
    )
    return EXIT_OK


def _count_ranks(config: Config) -> tuple[int, int]:
    """Return the number of ranks on each node, and on all nodes.

    The GPUs may be in another machine: what the user states need not be here.
    """
    trainer = config["trainer"]
    name = (config.get("choices") or {}).get("trainer", "this trainer")
    stated_gpus = trainer["devices"] if isinstance(trainer["devices"], int) else 1
    requested = resolve_devices(trainer, name, max(count_visible_gpus(), stated_gpus))[1]
    if not requested.several_processes:
        return 1, 1
    ranks_per_node = requested.ranks_per_node or requested.default_ranks
    return ranks_per_node, ranks_per_node * (requested.num_nodes or 1)


def _device_memory_gib(trainer: Config) -> float:
    """Return trainer.memory_limit_gib, or the free memory of this machine's GPU."""
    if trainer["memory_limit_gib"]:
        return float(trainer["memory_limit_gib"])
    if torch.cuda.is_available():
        return USABLE_SHARE * torch.cuda.mem_get_info()[0] / GIB
    raise UserError("--estimate needs the memory of a device: pass trainer.memory_limit_gib=16.")


def _count_images_of_epoch(config: Config) -> int:
    """Return data.epoch_size, or else the number of training images.

    They are listed, not opened, if data.root is on this machine. Otherwise it is MAX_IMAGES.
    """
    data = config["data"]
    if data.get("epoch_size"):
        return int(data["epoch_size"])
    root = str(data.get("root") or "")
    can_list = hasattr(resolve_target(data["_target_"], "data._target_"), "list_images")
    if not can_list or not root or not Path(root).exists():
        return MAX_IMAGES
    listed_data = build_prepared_data(config, {**data, "path": "loader", "global_batch_size": 1})
    return int(listed_data.num_train)


@dataclass(frozen=True)
class NumberFormats:
    """The formats in which a training computes.

    Args:
        precision: Lightning's name of it.
        dtype: the type of the weights and images.
        is_mixed: autocast computes in 16 bits.
        state_factor: stored bytes of the state for each byte that is counted. It is 2 where FSDP
            stores 32 bits and computes in 16.
    """

    precision: str
    dtype: torch.dtype
    is_mixed: bool
    state_factor: int

    @classmethod
    def from_config(cls, trainer: Config, *, is_sharded: bool) -> "NumberFormats":
        precision = trainer["precision"]
        if precision == "auto":
            precision = "32-true" if trainer["accelerator"] == "cpu" else "bf16-mixed"
        is_mixed = "mixed" in precision
        if is_sharded and is_mixed:
            return cls(precision, torch.bfloat16, is_mixed=False, state_factor=2)
        return cls(precision, TRUE_DTYPES.get(precision, torch.float32), is_mixed, state_factor=1)


@dataclass(frozen=True)
class StepMemory:
    """The bytes of tensors at one moment of a step, before they are sharded."""

    weights: int
    gradients: int
    optimizer: int
    total: int

    @classmethod
    def from_snapshot(cls, snapshot: Any) -> "StepMemory":
        """Return what MemTracker has counted."""
        bytes_by_kind = snapshot[torch.device("cpu")]
        sizes = {str(kind).rpartition(".")[2]: size for kind, size in bytes_by_kind.items()}
        return cls(sizes["PARAM"], sizes["GRAD"], sizes["OPT"], sizes["Total"])

    @property
    def activations(self) -> int:
        return self.total - self.weights - self.gradients - self.optimizer


def peak_bytes(config: Config, batch: int, ranks: int = 1, ranks_per_node: int = 1) -> float:
    """Return the peak bytes of tensors on one device: the largest sum at a moment of two steps.

        state_factor × (weights + gradients + optimizer + average) / shards
        + activations + gathered

    FSDP shards over all ranks, or over those of a node. It gathers units of the net. DDP keeps the
    gradients in buckets as large as the weights. The average is that of trainer.ema_decay.
    """
    trainer = config["trainer"]
    strategy = trainer["strategy"] or {}
    is_sharded = "FSDP" in strategy.get("_target_", "")
    formats = NumberFormats.from_config(trainer, is_sharded=is_sharded)
    module, shape = _build_without_contents(config, formats)
    moments = _trace_two_steps(module, trainer, formats, (batch, *shape))

    shards = 1
    if is_sharded:
        shards = ranks_per_node if strategy["shard_within_node"] else ranks
    weights = _parameter_bytes(module.net)
    gathered = _gathered_bytes(module.net) if shards > 1 else 0
    buckets = weights if ranks > 1 and not is_sharded else 0
    average = weights if trainer["ema_decay"] else 0

    peak = 0.0
    for moment in moments:
        gradients = max(moment.gradients, buckets)
        state = moment.weights + gradients + moment.optimizer + average
        peak = max(peak, formats.state_factor * state / shards + moment.activations + gathered)
    return peak


def _gathered_bytes(net: nn.Module) -> int:
    """Return the bytes of GATHERED_UNITS units that are as large as the largest one."""
    units = net.shard_units() if hasattr(net, "shard_units") else []
    return GATHERED_UNITS * max(map(_parameter_bytes, units or [net]))


def _build_without_contents(
    config: Config, formats: NumberFormats
) -> tuple[Any, tuple[int, int, int]]:
    """Return the module without contents, and the shape of an image: channels, height, width."""
    data = config["data"]
    size = data["image_size"]
    channels = data.get("channels")
    if not channels:
        channels = resolve_target(data["_target_"], "data._target_").channels
    num_classes = data.get("num_classes") or 10
    facts: Any = {
        "num_classes": num_classes,
        # The weights of classes change no size.
        "class_counts": [1] * num_classes,
        "image_size": size,
        "channels": channels,
    }
    # timm reads values of fake tensors, so the net is built without any.
    with torch.device("meta"):
        module: Any = build_module(config, facts, has_checkpoint=True)
        module.net.to(formats.dtype)
    _refuse_uncounted(config, module.net)
    return module, (channels, size, size)


def _refuse_uncounted(config: Config, net: nn.Module) -> None:
    """Refuse what the two steps would not count."""
    uncounted = ""
    if config["task"]["_target_"] not in COUNTED_TASKS:
        uncounted = str(config["task"]["_target_"])
    if (config["data"].get("views") or 1) > 1:
        uncounted = f"data.views={config['data']['views']}"
    # MemTracker waits for the gradient of each parameter.
    if not all(weight.requires_grad for weight in net.parameters()):
        uncounted = "frozen parameters"
    if uncounted:
        raise UserError(
            f"--estimate does not know {uncounted}: leave --estimate out, to search by short runs."
        )


def _trace_two_steps(
    module: Any, trainer: Config, formats: NumberFormats, shape: tuple[int, ...]
) -> list[StepMemory]:
    """Return the memory at the end of each forward, and at the peak, of two steps."""
    net = module.net
    tracker = MemTracker()
    moments = []
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=formats.is_mixed)
    with FakeTensorMode(allow_non_fake_inputs=True):
        net.to_empty(device="cpu")
        if trainer["activation_checkpointing"]:
            recompute_activations(net)
        module.scheduler_factory = None
        module.trainer = SimpleNamespace(precision=formats.precision)
        optimizer = module.configure_optimizers()
        tracker.track_external(net, optimizer)
        with tracker:
            for _ in range(2):
                images = torch.empty(shape, dtype=formats.dtype)
                targets = torch.zeros(shape[0], dtype=torch.int64)
                with autocast:
                    loss = nn.functional.cross_entropy(net(images), targets)
                moments.append(tracker.get_tracker_snapshot("current"))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del images, targets, loss
                tracker.reset_mod_stats()
        moments.append(tracker.get_tracker_snapshot("peak"))
    return [StepMemory.from_snapshot(moment) for moment in moments]


def _parameter_bytes(net: nn.Module) -> int:
    return sum(weight.nbytes for weight in net.parameters())
