"""A tiny classifier trained under any strategy, in this process or in ranks: what tests of strategies compare."""

import os
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from assemble import StartedRanks
from cluster import Cluster

CLASSES, FEATURES = 7, 12
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class TinyNet(nn.Module):
    """Three blocks between two linear layers, with a first dimension of 1 somewhere, as a ViT's class token has."""

    def __init__(self, batch_norm: bool = False, width: int = 10) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(width) if batch_norm else nn.Identity()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, width), norm)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.token = Shift(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        return self.head(self.token(self.blocks(self.embed(x))))

    def shard_units(self):
        return list(self.blocks)

    def stages(self):
        return [self.embed, *self.blocks, self.token, self.head]


class Shift(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.full((1, width), 0.1))

    def forward(self, x):
        return x + self.token


class Classifier(pl.LightningModule):
    def __init__(self, net: nn.Module, optimizer) -> None:
        super().__init__()
        self.net, self.optimizer, self.losses, self.overflow_at = net, optimizer, [], None

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.losses.append(float(loss.detach()))
        if self.overflow_at is not None and batch_idx == self.overflow_at and self.global_rank == 0:
            loss = loss * 1e30  # more than float16's gradients can hold, on one rank only
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/loss", F.cross_entropy(self.net(images), labels), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Batches:
    """The same global batches everywhere: micro-batch j of k and rank r of W take their contiguous part."""

    def __init__(self, steps: int, rank: int, world_size: int, accumulate: int, batch: int = 24) -> None:
        self.parts = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 + step)
            images = torch.randn(batch, 1, 3, FEATURES // 3, generator=generator)
            labels = torch.randint(0, CLASSES, (batch,), generator=generator)
            for micro in range(accumulate):
                size = batch // accumulate // world_size
                start = micro * (batch // accumulate) + rank * size
                self.parts.append((images[start : start + size], labels[start : start + size]))

    def __iter__(self):
        return iter(self.parts)

    def __len__(self):
        return len(self.parts)


def started_ranks(nodes: int = 1) -> StartedRanks:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    node_rank, local_rank = divmod(rank, world // nodes)
    port = int(os.environ["MASTER_PORT"])
    return StartedRanks(Cluster("supervisor", nodes, world // nodes, node_rank, local_rank, "127.0.0.1", port))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def strategy_of(name: str, device: torch.device = CPU, nodes: int = 1, **own: Any):
    """None, or one of the strategies that run in several ranks, built as assemble does."""
    if name == "one":
        return None
    if name == "model_parallel":
        from strategies.model_parallel import ModelParallel

        return ModelParallel(**own)
    from strategies.allreduce import AllReduce
    from strategies.ddp import DDP
    from strategies.sharded import Sharded

    cls = {"ddp": DDP, "fsdp": Sharded, "allreduce": AllReduce}[name]
    environment = started_ranks(nodes)
    devices = [device] * (environment.world_size() // nodes)
    return cls(parallel_devices=devices, cluster_environment=environment, timeout=timedelta(seconds=60), **own)


def fit(
    name: str,
    *,
    precision: str = "64-true",
    steps: int = 6,
    accumulate: int = 1,
    optimizer=sgd,
    batch_norm: bool = False,
    sync_batchnorm: bool = False,
    clip: float | None = None,
    save: str | None = None,
    resume: str | None = None,
    overflow_at: int | None = None,
    device: torch.device = CPU,
    nodes: int = 1,
    test: bool = False,
    inspect: Any = None,
    own: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train; returns this rank's losses, the whole weights (rank 0) and what `inspect(trainer)` says."""
    from strategies.sync_batchnorm import layer_sync

    warnings.filterwarnings("ignore", module="lightning")
    torch.manual_seed(3)
    module = Classifier(TinyNet(batch_norm), optimizer)
    module.overflow_at = overflow_at
    strategy = strategy_of(name, device, nodes, **(own or {}))
    world = 1 if name in ("one", "model_parallel") else strategy.world_size
    plugins: list[Any] = [layer_sync(device.type)] if sync_batchnorm else []
    given: dict[str, Any] = {"precision": precision}
    if hasattr(strategy, "precision_for"):
        plugins.append(strategy.precision_for(precision, device.type))
        given = {}
    trainer = pl.Trainer(
        accelerator="cpu" if device.type == "cpu" else "gpu",
        devices=1 if strategy is None or world == 1 else world // nodes,
        num_nodes=nodes,
        strategy=strategy or "auto",
        plugins=plugins,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **given,
    )
    rank = trainer.global_rank
    train = Batches(steps, rank, world, accumulate)
    held_out = Batches(2, rank, world, 1)
    result: dict[str, Any] = {}
    if test:
        result["test"] = trainer.test(module, held_out, ckpt_path=resume, verbose=False, weights_only=True)
    else:
        trainer.fit(module, train, held_out, ckpt_path=resume, weights_only=True)
        result["val"] = float(trainer.callback_metrics["val/loss"])
    if save:
        trainer.save_checkpoint(save)
    state = trainer.strategy.lightning_module_state_dict()
    if getattr(strategy, "sharded_checkpoint", False):
        from strategies.sharded_state import full_state_dict

        state = full_state_dict(state, keep=rank == 0)
    result |= {
        "losses": module.losses,
        "weights": {
            k: v.detach().cpu().float().numpy() if v.dtype == torch.bfloat16 else v.detach().cpu().numpy().copy()
            for k, v in state.items()
        },
    }
    if inspect is not None:
        result["inspect"] = inspect(trainer)
    return result


def as_array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest relative difference of two sets of weights."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    norm = np.linalg.norm
    return max(float(norm(np.ravel(a[k] - b[k])) / max(norm(np.ravel(b[k])), 1e-12)) for k in a)


def mean_losses(ranks: list[dict[str, Any]], accumulate: int = 1) -> list[float]:
    """The loss of each global batch from the ranks' losses of their parts."""
    per_step = torch.tensor([r["losses"] for r in ranks], dtype=torch.float64).mean(0)
    return per_step.view(-1, accumulate).mean(1).tolist()


fit_fsdp = partial(fit, "fsdp")
