"""Build Lightning's Trainer from the options of trainer=."""

import inspect
import logging
import math
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lockstep.callbacks.training_log import ValidationInterval
from lockstep.checkpoints.io import CheckpointFiles
from lockstep.config.instantiate import build
from lockstep.process.errors import UserError
from lockstep.runs.join import StartedRanks
from lockstep.runs.plan import RunPlan
from lockstep.strategies.base import capabilities

log = logging.getLogger(__name__)

PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}  # Lightning's short names
# Arguments that are derived here; what Lightning's Trainer does not know is ours or the strategy's.
DERIVED = ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic",
           "max_time", "plugins", "use_distributed_sampler")  # fmt: skip


def build_trainer(
    plan: RunPlan, strategy: Any, callbacks: list[Any], loggers: list[Any], data: Any, *, trainable: bool
) -> pl.Trainer:
    """
    Args:
        data: placed on this rank, or a data module of Lightning's own kind.
        trainable: False for an evaluation.
    """
    own, cluster, able = plan.trainer, plan.cluster, capabilities(strategy)
    if own["log_every_n_steps"] < 1:
        raise UserError(f"trainer.log_every_n_steps={own['log_every_n_steps']}: give a whole number from 1 on.")
    known = inspect.signature(pl.Trainer).parameters.keys() - set(DERIVED)
    arguments = {key: value for key, value in own.items() if key in known}
    arguments.update(accumulate_grad_batches=plan.batch.accumulate, profiler=_profiler(own.get("profiler"), plan))
    is_placed, is_gpu = hasattr(data, "place"), plan.accelerator == "gpu"
    if is_placed:
        arguments.update(_limits(plan, data, trainable=trainable))
        if isinstance(every := arguments["val_check_interval"], int):
            callbacks = [ValidationInterval(every), *callbacks]
    elif cluster.is_rank_zero and cluster.world_size > 1:
        log.info("Lightning's samplers spread the data: in an evaluation some samples may count twice.")
    plugins: list[Any] = [StartedRanks(cluster), CheckpointFiles(), *build(own.get("plugins") or [])]
    precision: Any = PRECISIONS.get(str(own["precision"]), str(own["precision"]))
    if precision == "auto":
        has_bf16 = is_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16-mixed" if has_bf16 else "16-mixed" if is_gpu and able.scales_losses else "32-true"
    if plugin := able.precision_for(precision, "cuda" if is_gpu else "cpu"):
        plugins.append(plugin)
        precision = None
    try:
        return pl.Trainer(
            accelerator=plan.accelerator,
            devices=cluster.devices,
            num_nodes=cluster.num_nodes,
            strategy=strategy,
            precision=precision,
            plugins=plugins,
            callbacks=callbacks,
            logger=loggers,
            deterministic=not is_gpu if own["deterministic"] == "auto" else own["deterministic"],
            default_root_dir=str(plan.folder.path),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
            enable_model_summary=any(isinstance(callback, ModelSummary) for callback in callbacks),
            use_distributed_sampler=not is_placed and own.get("use_distributed_sampler", True),
            **arguments,
        )
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"trainer: {error}") from None


def _profiler(stated: Any, plan: RunPlan) -> Any:
    """Return a profiler that writes into the run folder; Lightning's default would only log its table."""
    place = {"dirpath": plan.folder.path, "filename": "profile"}
    if isinstance(stated, dict) or not stated:
        return build(stated, place) if stated else None
    if stated not in PROFILERS:
        raise UserError(f"trainer.profiler={stated}: take {', '.join(PROFILERS)} or null.")
    return PROFILERS[stated](**place)


def _limits(plan: RunPlan, data: Any, *, trainable: bool) -> dict[str, Any]:
    """Return limits of an epoch in whole optimizer steps, and the interval of validations in micro-batches."""
    own, accumulate = plan.trainer, plan.batch.accumulate
    limits: dict[str, Any] = {"val_check_interval": 1.0} | ({} if data.num_val else {"limit_val_batches": 0.0})
    if trainable:
        batches = data.num_train // data.global_batch_size * accumulate
        limit = whole_steps(own["limit_train_batches"], batches, accumulate)
        cut = own.get("overfit_batches") or limit
        batches = cut if isinstance(cut, int) else int(cut * batches)
        interval = validation_interval(own["val_check_interval"], batches, accumulate)
        limits.update(limit_train_batches=limit, val_check_interval=interval)
    return limits


def whole_steps(limit: float, batches: int, accumulate: int) -> float:
    """Return trainer.limit_train_batches so that an epoch ends with a whole optimizer step.

    Args:
        limit: a share (float) or number (int) of `batches`, the micro-batches of an epoch.
    Raises:
        UserError: not even one step fits.
    """
    wanted = min(limit, batches) if isinstance(limit, int) else int(limit * batches)
    if wanted % accumulate == 0 or not limit:
        return limit
    if wanted < accumulate:
        raise UserError(
            f"trainer.limit_train_batches={limit} leaves {wanted} micro-batches and a step takes {accumulate}: "
            f"give at least {accumulate}."
        )
    return wanted - wanted % accumulate


def validation_interval(stated: float, batches: int, accumulate: int) -> float:
    """Return trainer.val_check_interval as Lightning counts it: in micro-batches (int); 1.0 for an epoch's end only.

    Args:
        stated: a share of an epoch (float), or optimizer steps (int).
        batches: micro-batches of an epoch, whole steps.
    Raises:
        UserError: neither, or more steps than an epoch has.
    """
    steps, is_share = batches // accumulate, isinstance(stated, float)
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 < stated <= (1 if is_share else steps):
        raise UserError(
            f"trainer.val_check_interval={stated}: give a share of an epoch above 0 and up to 1.0, or a whole number "
            f"of optimizer steps from 1 to {steps}, which is an epoch (trainer.check_val_every_n_epoch for more)."
        )
    every = math.ceil(stated * steps - 1e-9) if is_share else stated
    return 1.0 if every >= steps else every * accumulate
