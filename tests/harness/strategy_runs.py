"""A tiny classifier trained under any strategy, in this process or in ranks: what tests of
strategies compare.
"""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from local_ranks import local_cluster, meet, run_ranks
from lockstep.checkpoints.io import CheckpointFiles
from lockstep.ranks.find import Cluster
from lockstep.runs.join import StartedRanks
from lockstep.strategies.base import capabilities
from lockstep.strategies.ddp import DDP
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.recompute import recompute_activations
from lockstep.strategies.sync_batchnorm import synchronise
from strategies.allreduce import AllReduce
from strategies.ddp_model_parallel import DDPModelParallel
from strategies.model_parallel import ModelParallel

CLASSES, FEATURES = 7, 12
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class TinyNet(nn.Module):
    """Three blocks between two linear layers, with a first dimension of 1 somewhere, as a ViT's
    class token has.
    """

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
        self.log("held_out_loss", F.cross_entropy(self.net(images), labels), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return self.optimizer(self.parameters())


class Batches:
    """The same global batches everywhere: micro-batch j of k and rank r of W take their contiguous
    part.
    """

    def __init__(
        self, steps: int, rank: int, world_size: int, accumulate: int, batch: int = 24
    ) -> None:
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


def sgd(parameters, **kernel):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **kernel)


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters, **kernel):
    return torch.optim.AdamW(parameters, lr=0.01, **kernel)


def strategy_of(name: str, **own: Any) -> Any:
    """One of ours with its own options; Lightning's default for "one"."""
    known = {
        "ddp": DDP,
        "fsdp": FSDP,
        "allreduce": AllReduce,
        "model_parallel": ModelParallel,
        "ddp_model_parallel": DDPModelParallel,
    }
    return "auto" if name == "one" else known[name](**own)


def trainer_of(
    cluster: Cluster,
    strategy: Any,
    precision: str = "64-true",
    device: torch.device = CPU,
    **options: Any,
) -> pl.Trainer:
    """Return a silent Trainer of one rank, which joins the others.

    Args:
        strategy: of Lightning or Lockstep; "auto" for one process.
        options: of the Trainer, in place of those here.
    """
    meet(cluster, device.type)
    warnings.filterwarnings("ignore", module="lightning")
    for library in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(library).setLevel(logging.ERROR)
    plugins: list[Any] = [StartedRanks(cluster), CheckpointFiles()]
    precision_plugin = capabilities(strategy).precision_for(precision, device.type)
    if precision_plugin:
        plugins.append(precision_plugin)
    else:
        options["precision"] = precision
    arguments: dict[str, Any] = {
        "accelerator": "cpu" if device.type == "cpu" else "gpu",
        "devices": cluster.ranks_per_node,
        "num_nodes": cluster.num_nodes,
        "strategy": strategy,
        "plugins": plugins,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**{**arguments, **options})


def fit(
    cluster: Cluster, name: str, *, precision: str = "64-true", steps: int = 6, epochs: int = 1, accumulate: int = 1,
    optimizer=sgd, batch_norm: bool = False, sync_batchnorm: bool = False, clip: float | None = None,
    save: str | None = None, resume: str | None = None, overflow_at: int | None = None, device: torch.device = CPU,
    test: bool = False, inspect: Any = None, own: dict[str, Any] | None = None, recompute: bool = False,
    callbacks: Sequence[pl.Callback] = (),
) -> dict[str, Any]:  # fmt: skip
    """Train; returns this rank's losses, the whole weights (rank 0) and what `inspect(trainer)`
    says.
    """
    torch.manual_seed(3)
    module = Classifier(TinyNet(batch_norm), optimizer)
    if precision == "64-true":
        module.double()  # Lightning restores weights before it converts the module
    if sync_batchnorm:
        synchronise(module.net, device.type)
    if recompute:
        recompute_activations(module.net)
    module.overflow_at = overflow_at
    trainer = trainer_of(
        cluster,
        strategy_of(name, **(own or {})),
        precision,
        device,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        callbacks=list(callbacks),
    )
    train = Batches(steps, cluster.rank, cluster.world_size, accumulate)
    held_out = Batches(2, cluster.rank, cluster.world_size, 1)
    result: dict[str, Any] = {}
    if test:
        [values] = trainer.test(
            module, held_out, ckpt_path=resume, verbose=False, weights_only=True
        )
        result["test"] = values["held_out_loss"]
    else:
        trainer.fit(module, train, held_out, ckpt_path=resume, weights_only=True)
        result["val"] = float(trainer.callback_metrics["held_out_loss"])
    if save:
        trainer.save_checkpoint(save)
    state = trainer.strategy.lightning_module_state_dict()
    weights = {name: value.detach().cpu().numpy().copy() for name, value in state.items()}
    result |= {"losses": module.losses, "weights": weights}
    if inspect is not None:
        result["inspect"] = inspect(trainer)
    return result


def scale(trainer: pl.Trainer) -> float:
    """The factor of fp16's losses, which an overflow halves."""
    return trainer.precision_plugin.scaler.get_scale()


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """The largest relative difference of two sets of weights."""
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    norm = np.linalg.norm
    return max(float(norm(np.ravel(a[k] - b[k])) / max(norm(np.ravel(b[k])), 1e-12)) for k in a)


def mean_losses(found: list[dict[str, Any]], accumulate: int = 1) -> list[float]:
    """The loss of each global batch from the ranks' losses of their parts."""
    per_step = torch.tensor([r["losses"] for r in found], dtype=torch.float64).mean(0)
    return per_step.view(-1, accumulate).mean(1).tolist()


def one(**settings: Any) -> dict[str, Any]:
    """The same in this process."""
    return fit(local_cluster(0, 1, 0), "one", **settings)


def ranks(name: str, world_size: int, num_nodes: int = 1, **settings: Any) -> list[dict[str, Any]]:
    """Each rank's result."""
    return ranks_all(world_size, [(name, settings)], num_nodes)[0]


def fit_all(cluster: Cluster, runs: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [fit(cluster, name, **settings) for name, settings in runs]


def ranks_all(
    world_size: int, runs: list[tuple[str, dict[str, Any]]], num_nodes: int = 1
) -> list[list[dict[str, Any]]]:
    """Several runs one after the other in the same ranks; each rank's result of each run."""
    every_rank = run_ranks(fit_all, world_size, runs, num_nodes=num_nodes, timeout_s=240)
    return [list(of_one_run) for of_one_run in zip(*every_rank, strict=True)]


def difference(found: list[dict[str, Any]], expected: dict[str, Any], accumulate: int = 1) -> float:
    """The largest relative difference of losses and final weights."""
    pairs = zip(mean_losses(found, accumulate), expected["losses"], strict=True)
    return max(*(abs(a - b) / b for a, b in pairs), worst(found[0]["weights"], expected["weights"]))
