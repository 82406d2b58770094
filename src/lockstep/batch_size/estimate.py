"""Uses torch's private `_subclasses` and `_tools`, which count the memory of a training without its hardware.

Estimate the largest batch by two steps on fake tensors, which have shapes and no contents.

    python src/find_batch_size.py model=vit trainer=fsdp trainer.num_nodes=8 trainer.memory_limit_gib=16 --estimate
"""

import logging
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lockstep.batch_size.search import GIB, USABLE, fitting, next_batch
from lockstep.config.compose import plain
from lockstep.config.instantiate import resolve_target
from lockstep.runs.config import Config
from lockstep.runs.errors import EXIT_OK, UserError
from lockstep.strategies.recompute import recompute_activations
from lockstep.training.build_module import build_module

log = logging.getLogger(__name__)

MARGIN = 1.1  # the allocator's gaps and cuDNN's workspaces: 4 % for ViT-B/32, 9 % for ResNet-18
KNOWN = ("DDP", "FSDP", "AllReduce", "")
TASKS = ("tasks.classifier.ImageClassifier", "tasks.multilabel.MultiLabel", "tasks.regression.Regression")
TRUE_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.bfloat16, "64-true": torch.float64}


def estimate(cfg: Any) -> int:
    """Log the memory of each batch that is tried and the largest one; return the exit code."""
    config = plain(cfg)
    trainer = config["trainer"]
    if (trainer["strategy"] or {}).get("_target_", "").rpartition(".")[2] not in KNOWN:
        raise UserError("--estimate does not know this trainer: use trainer=gpu, ddp, fsdp or allreduce.")
    limit = trainer["memory_limit_gib"]
    if not limit and torch.cuda.is_available():
        limit = USABLE * torch.cuda.mem_get_info()[0] / GIB
    if not limit:
        raise UserError("--estimate needs the memory of a device: pass trainer.memory_limit_gib=16.")
    devices, nodes = (trainer[key] if trainer[key] != "auto" else 1 for key in ("devices", "num_nodes"))
    ranks = 1 if trainer["launch"] == "one_process" else devices * nodes
    tried: dict[int, float | None] = {}
    batch: int | None = 8
    while batch is not None:
        tried[batch] = peak = MARGIN * peak_bytes(config, batch, ranks, devices) / GIB
        log.info(f"{batch} images per device: {peak:.3g} of {limit:.3g} GiB")
        batch = next_batch(tried, limit, bound=65536)  # the data are not read
    fit, accumulate = fitting(tried, limit), trainer["accumulate_grad_batches"]
    log.info(
        f"estimated largest batch {fit} per device, {fit * ranks * accumulate} global = {fit} × {ranks} × {accumulate}"
        f" · {tried[fit]:.3g} of {limit:.3g} GiB, {MARGIN - 1:.0%} of it for the allocator · nothing was run"
    )
    return EXIT_OK


def peak_bytes(config: Config, batch: int, ranks: int = 1, devices: int = 1) -> float:
    """Return the peak bytes of tensors on one device; FSDP shards over all ranks, or over the `devices` of a node."""
    trainer, data, strategy = config["trainer"], config["data"], config["trainer"]["strategy"] or {}
    size = data["image_size"]
    channels = data.get("channels") or resolve_target(data["_target_"], "data._target_").channels
    auto = "32-true" if trainer["accelerator"] == "cpu" else "bf16-mixed"
    precision = trainer["precision"] if trainer["precision"] != "auto" else auto
    sharded = "FSDP" in strategy.get("_target_", "")
    dtype = torch.bfloat16 if sharded and "mixed" in precision else TRUE_DTYPES.get(precision, torch.float32)
    mixed = torch.autocast("cpu", torch.bfloat16, enabled="mixed" in precision and not sharded)
    facts: Any = {"num_classes": data.get("num_classes") or 10, "image_size": size, "channels": channels}
    with torch.device("meta"):  # timm reads values of fake tensors, so the net is built without any
        module: Any = build_module(config, facts, has_checkpoint=True)
        net = module.net.to(dtype)
    unknown = "" if config["task"]["_target_"] in TASKS else str(config["task"]["_target_"])
    unknown = f"data.views={data['views']}" if (data.get("views") or 1) > 1 else unknown
    if not all(weight.requires_grad for weight in net.parameters()):  # MemTracker waits for each one's gradient
        unknown = "frozen parameters"
    if unknown:
        raise UserError(f"--estimate does not know {unknown}: leave --estimate out, to search by short runs.")
    with FakeTensorMode(allow_non_fake_inputs=True):
        net.to_empty(device="cpu")
        if trainer["activation_checkpointing"]:
            recompute_activations(net)
        module.scheduler_factory, module.trainer = None, SimpleNamespace(precision=precision)
        optimizer = module.configure_optimizers()
        tracker, moments = MemTracker(), []
        tracker.track_external(net, optimizer)
        with tracker:
            for _ in range(2):
                images = torch.empty(batch, channels, size, size, dtype=dtype)
                with mixed:
                    loss = nn.functional.cross_entropy(net(images), torch.zeros(batch, dtype=torch.int64))
                moments.append(tracker.get_tracker_snapshot("current"))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del images, loss
                tracker.reset_mod_stats()
        moments.append(tracker.get_tracker_snapshot("peak"))
    weights = _bytes(net)
    shards = 1 if not sharded else devices if strategy["shard_within_node"] else ranks
    units = getattr(net, "shard_units", list)() or [net]
    gathered = 3 * max(map(_bytes, units)) if shards > 1 else 0  # two units and the gradients of one
    copies = 2 if sharded and "mixed" in precision else 1  # FSDP keeps its shards in 32 bits, the net here has 16

    def on_one_device(moment: Any) -> float:
        held = {str(kind).rpartition(".")[2]: size for kind, size in moment[torch.device("cpu")].items()}
        gradients = max(held["GRAD"], weights) if ranks > 1 and not sharded else held["GRAD"]  # DDP keeps its buckets
        state = held["PARAM"] + gradients + held["OPT"] + (weights if trainer["ema_decay"] else 0)
        return copies * state / shards + held["Total"] - held["PARAM"] - held["GRAD"] - held["OPT"] + gathered

    return max(map(on_one_device, moments))


def _bytes(net: nn.Module) -> int:
    return sum(weight.nbytes for weight in net.parameters())
