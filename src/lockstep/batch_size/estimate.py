"""Uses torch's `_subclasses.fake_tensor`, `_disable_current_modes` and `testing._internal`'s fake process group.

Memory and largest batch of a training without its hardware: the real trainer's steps on fake tensors, which torch has
under these names only.

    python src/find_batch_size.py model=… trainer=fsdp trainer.num_nodes=8 hardware=g4dn.12xlarge --estimate

Rank 0 of a fake process group of any size runs two steps and a validation; tensors have shapes and no contents.
"""

import inspect
import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.batch_size.allocator import PlayedAllocator, workspace_bytes
from lockstep.batch_size.ddp_buckets import Buckets
from lockstep.batch_size.fake_images import FakeImages
from lockstep.batch_size.least_batch import least_batch
from lockstep.batch_size.memory import GIB, MemoryPhases, TrackedBytes
from lockstep.batch_size.search import Probe, Shares, is_reserved, largest_batch
from lockstep.batch_size.sessions import line_of
from lockstep.config.compose import chosen_options, plain
from lockstep.config.instantiate import resolve_target
from lockstep.distributed.cluster import Cluster
from lockstep.launch.plan import RunPlan
from lockstep.runs.batch import Batch
from lockstep.runs.config import Config, read_only, writable
from lockstep.runs.errors import EXIT_OK, UserError
from lockstep.runs.folder import RunFolder
from lockstep.strategies import sharded
from lockstep.strategies.sharded import Sharded
from lockstep.training.build import build_module, prepare_net
from lockstep.training.checks import DataFacts
from lockstep.training.rank import prepare_process
from lockstep.training.trainer import build_strategy, build_trainer

log = logging.getLogger(__name__)

RUNTIME_GIB = 0.6  # assumed for CUDA's context and NCCL, which lie beside the allocator's memory
ALLOCATOR = "allocator"  # the phase that stands for what a GPU's allocator would have reserved in all
UNBOUND = 65536  # largest batch that is tried: the data are not looked at
CLASSES = 10  # where the data do not say before they are read
KNOWN = (
    "lockstep.strategies.ddp.DDP",
    "lockstep.strategies.sharded.Sharded",
    "lockstep.strategies.allreduce.AllReduce",
)
TRUE_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}
AS_LARGE = {"16-mixed": "bf16-mixed", "16-true": "bf16-true"}  # fp16's loss scaling reads values, and holds none


def estimate(cfg: Any) -> int:
    """What --estimate does: the largest batch and the memory at its phases, printed."""
    config, choices = read_only(plain(cfg)), chosen_options(cfg)
    limit_gib = stated_limit_gib(config)
    plan = stated_plan(config, choices)
    log.info("Estimating on tensors without contents: a line for each batch that is tried …")
    prepare_process(plan)
    facts, cluster = stated_facts(config), plan.cluster
    if plan.trainer["launch"] != "one_process":
        # DTensor's own shape propagation, done once, would be counted; BatchNorm refuses a single image
        peak_bytes(plan, facts, 2)

    def fits(batch: int) -> Shares:
        shares = [{phase: held / (limit_gib * GIB) for phase, held in peak_bytes(plan, facts, batch).items()}]
        log.info(line_of(Probe(batch, shares), limit_gib))
        return shares

    least = least_batch(config, facts, cluster.world_size)
    found = largest_batch(fits, bound=UNBOUND, least=least)
    if found.batch == 0:
        images = "one image" if least == 1 else f"{least} images, the fewest that the net takes,"
        needs = _phases(fits(least), limit_gib)
        raise UserError(f"Not even {images} for each device fits into {limit_gib:.3g} GiB: {needs}.")
    parts = cluster.world_size * plan.batch.accumulate
    shares = next(probe.shares for probe in found.probes if probe.batch == found.batch)
    at_least = "at least " if found.at_bound else ""  # the estimate stops there, the memory does not
    log.info(
        f"estimated largest batch {at_least}{found.batch} per device, {at_least}{found.batch * parts} global = "
        f"{found.batch} × {cluster.world_size} × {plan.batch.accumulate} · "
        f"{_phases(shares, limit_gib)} of {limit_gib:.3g} GiB · nothing was run"
    )
    return EXIT_OK


def _phases(shares: Shares | None, limit_gib: float) -> str:
    return ", ".join(f"{phase} {share * limit_gib:.2f}" for phase, share in (shares or [{}])[0].items())


def stated_plan(config: Config, choices: Config) -> RunPlan:
    """A training on what the options and `hardware=` describe, one image for each device; its folder is none."""
    accelerator = "cpu" if config["trainer"]["accelerator"] == "cpu" else "gpu"
    cluster, accumulate = stated_cluster(config, choices["trainer"]), config["trainer"]["accumulate_grad_batches"]
    batch = Batch.of_device(1, cluster.world_size, accumulate)
    return RunPlan(config, choices, (), cluster, accelerator, RunFolder(Path()), batch)


def stated_cluster(config: Config, trainer_name: str) -> Cluster:
    """The cluster that the options and `hardware=` describe; nothing of this machine goes in."""
    trainer, hardware = config["trainer"], config.get("hardware") or {}
    if (trainer["strategy"] or {}).get("_target_", KNOWN[0]) not in KNOWN:
        raise UserError(f"--estimate knows cpu, gpu, ddp, fsdp, allreduce and their _sim, not {trainer_name}.")
    if trainer["launch"] == "one_process":
        return Cluster("none", 1, 1, 0, 0, "127.0.0.1", None)
    devices = hardware.get("gpus") or 1 if trainer["devices"] == "auto" else trainer["devices"]
    if trainer["devices"] != "auto" and hardware.get("gpus") and devices > hardware["gpus"]:
        gpus = f"{hardware['gpus']} GPU{'s' if hardware['gpus'] > 1 else ''}"
        log.info(f"A {hardware['name']} has {gpus}: this is for {devices} such GPUs on each node, as asked.")
    num_nodes = 1 if trainer["num_nodes"] == "auto" else trainer["num_nodes"]
    return Cluster("none", num_nodes, devices, 0, 0, "127.0.0.1", None)


def stated_limit_gib(config: Config) -> float:
    """What tensors may take of one device."""
    trainer, hardware = config["trainer"], config.get("hardware") or {}
    fraction = trainer.get("memory_fraction") or 1.0
    if trainer.get("memory_limit_gib"):
        return trainer["memory_limit_gib"] * fraction
    if hardware.get("gpu_memory_gib"):
        return hardware["gpu_memory_gib"] * fraction - RUNTIME_GIB
    raise UserError(
        "--estimate needs to know the memory: hardware=g4dn.xlarge names a machine, or trainer.memory_limit_gib=."
    )


def stated_facts(config: Config) -> DataFacts:
    """Shape of the images without reading them; the number of classes hardly matters for memory."""
    data = resolve_target(config["data"]["_target_"], "data._target_")
    return {
        "num_classes": config["data"].get("num_classes") or CLASSES,
        "image_size": config["data"]["image_size"],
        "channels": config["data"].get("channels") or data.channels,
    }


class Shapes(FakeTensorMode):
    """Fake tensors that answer 1 where a program reads a value (optimizer step counts, votes of the ranks)."""

    def dispatch(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            return _one(args[0].dtype)
        return super().dispatch(func, types, args, kwargs)


def _one(dtype: torch.dtype) -> Any:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


def peak_bytes(plan: RunPlan, facts: DataFacts, batch: int) -> dict[str, int]:
    """Bytes at the peak of each phase on rank 0, at this batch for each device.

    Args:
        facts: num_classes, image_size and channels of the data.
    """
    warnings.filterwarnings("ignore", ".*across ranks is zero.*")  # a sum over ranks that reads 1, see Shapes
    on_gpu, cluster = plan.accelerator != "cpu", plan.cluster
    config = writable(plan.config)
    accumulate = min(plan.batch.accumulate, 2)
    precision, scales = _precision(config, on_gpu), _scales_losses(config, on_gpu)
    config["trainer"].update(
        precision=precision, accumulate_grad_batches=accumulate, max_epochs=1, max_steps=-1,
        limit_train_batches=2 * accumulate, limit_val_batches=1, num_sanity_val_steps=0, check_val_every_n_epoch=1,
        compile=False,
    )  # fmt: skip
    config["model"].update(
        {key: value for key, value in (("pretrained", False), ("weights", None)) if key in config["model"]}
    )
    shape = (facts["channels"], facts["image_size"], facts["image_size"])
    eval_batch = config["data"].get("eval_batch_size") or batch
    small = replace(
        plan, config=read_only(config), accelerator="cpu", batch=Batch.of_device(batch, cluster.world_size, accumulate)
    )
    with fake_process_group(plan), torch.device("meta"):
        module = build_module(config, facts)
        if precision in TRUE_DTYPES:
            module = module.to(TRUE_DTYPES[precision])
    factory: Any = module.optimizer_factory
    if scales and "foreach" in inspect.signature(factory.func).parameters:
        # With scaled losses no kernel steps all parameters at once, and a GPU holds a term of every one of them.
        module.optimizer_factory = partial(factory, **{"foreach": True, **factory.keywords})  # type: ignore[assignment]
    capability = float((config.get("hardware") or {}).get("gpu_capability") or 0)
    tracker = PlayedAllocator(workspace_bytes(capability)) if on_gpu else TrackedBytes()
    mode = Shapes(allow_non_fake_inputs=True)
    as_there = as_on_gpus(tracker) if isinstance(tracker, PlayedAllocator) else nullcontext()
    with fake_process_group(plan), mode, tracker, as_there, tempfile.TemporaryDirectory() as folder:
        strategy = build_strategy(small)
        comes_later: Any = module.net if on_gpu and isinstance(strategy, Sharded) else None
        materialise(module, but=comes_later)
        prepare_net(module, small)
        phases = MemoryPhases(tracker)
        trainer = build_trainer(small, strategy, [phases], [], Path(folder))
        adapt(trainer.strategy)
        stay_in_place(module)
        average = [torch.empty_like(p) for p in module.parameters()] if config["trainer"]["ema_decay"] else []
        trainer.fit(module, datamodule=FakeImages(shape, batch, eval_batch, 2 * accumulate, facts["num_classes"]))
        del average
    # Nothing runs out of memory here: what the allocator reserves is what has to fit.
    return {ALLOCATOR if is_reserved(phase) else phase: int(share) for phase, share in phases.shares.items()}


@contextmanager
def as_on_gpus(played: PlayedAllocator) -> Iterator[None]:
    """What happens on GPUs only: FSDP brings weights there from the host unit by unit, dropout's mask is of bytes."""

    def one_by_one(weights: list[torch.Tensor], device: torch.device) -> None:
        for weight in weights if dist.get_world_size() > 1 else ():
            torch.empty_like(weight, device=device)

    def unit_by_unit(unit: nn.Module, **options: Any) -> Any:
        materialise(unit)
        return fully_shard(unit, **options)

    def with_mask(values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if inplace or not training or not 0 < p < 1:
            return dropout(values, p, training, inplace)
        return values * torch.empty_like(values, dtype=torch.bool)

    dropout = nn.functional.dropout
    with (
        mock.patch.object(torch.cuda, "empty_cache", played.give_back),  # Lightning calls it before the first step
        mock.patch.object(sharded, "broadcast_from_rank_zero", one_by_one),
        mock.patch.object(sharded, "fully_shard", unit_by_unit),
        mock.patch.object(nn.functional, "dropout", with_mask),
    ):
        yield


def stay_in_place(module: Any) -> None:
    """Everything is on its device and in its precision already, and the counts of an evaluation have no values."""
    module.to = module.cpu = module.double = lambda *args, **kwargs: module
    module.on_validation_epoch_end = lambda: None


def adapt(strategy: Any) -> None:
    """What a strategy does with real values or in C++, in a form that shapes suffice for."""
    make_mesh = strategy.setup_environment

    def with_real_tensors() -> None:
        with _disable_current_modes():
            make_mesh()

    strategy.setup_environment = with_real_tensors
    strategy.broadcast = lambda value, src=0: value
    ddp: Any = strategy
    if isinstance(strategy, DDPStrategy):
        ddp.configure_ddp = lambda: setattr(ddp, "model", Buckets(ddp.model, getattr(ddp, "bucket_cap_mb", 25.0)))
        ddp.block_backward_sync = lambda: ddp.model.accumulating()


def _precision(config: Config, on_gpu: bool) -> str:
    stated = config["trainer"]["precision"]
    if stated == "auto":
        stated = "bf16-mixed" if on_gpu else "32-true"
    return AS_LARGE.get(stated, stated)


def _scales_losses(config: Config, on_gpu: bool) -> bool:
    """fp16, as `auto` is on a GPU whose data sheet has no bfloat16."""
    stated = str(config["trainer"]["precision"])
    peaks = (config.get("hardware") or {}).get("peak_tflops") or {}
    lacks_it = "bfloat16" in peaks and peaks["bfloat16"] is None
    return stated in ("16", "16-mixed") or (stated == "auto" and on_gpu and lacks_it)


def materialise(module: nn.Module, but: nn.Module | None = None) -> None:
    """Replace parameters and buffers on the meta device by fakes on the CPU; those of `but` stay there, as fakes."""
    left = set(but.modules() if but else ())
    for owner in module.modules():
        device = "meta" if owner in left else "cpu"
        for name, weight in list(owner.named_parameters(recurse=False)):
            if weight.device.type == "meta":
                setattr(owner, name, nn.Parameter(torch.empty_like(weight, device=device), weight.requires_grad))
        for name, value in list(owner.named_buffers(recurse=False)):
            if value.device.type == "meta":
                setattr(owner, name, torch.empty_like(value, device=device))


@contextmanager
def fake_process_group(plan: RunPlan) -> Iterator[None]:
    """A process group of the plan's size whose collectives do nothing; this process is rank 0."""
    if plan.trainer["launch"] == "one_process":
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with mock.patch.object(FakeTensor, "data_ptr", lambda tensor: id(tensor)):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.cluster.world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
