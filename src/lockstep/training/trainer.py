"""Build Lightning's Trainer from the plan of a run."""

import inspect
import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lockstep.callbacks.checkpoint_io import CheckpointFiles
from lockstep.callbacks.interruption import silence_lightning
from lockstep.callbacks.training_log import ValidationInterval
from lockstep.config.instantiate import build
from lockstep.launch.plan import RunPlan
from lockstep.runs.errors import UserError
from lockstep.strategies.base import Capabilities, capabilities
from lockstep.training.checks import validation_interval, whole_steps
from lockstep.training.rank import StartedRanks

log = logging.getLogger(__name__)

PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
OWN_TRAINER_KEYS = ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic",
                    "max_time", "plugins", "use_distributed_sampler")  # fmt: skip


def precision_of(plan: RunPlan, able: Capabilities) -> str:
    """Return the precision; auto: bf16 where the hardware has it, else fp16 if losses are scaled; fp32 on the CPU.

    Raises:
        UserError: none of those that every strategy knows.
    """
    stated = str(plan.trainer["precision"])
    stated = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}.get(stated, stated)
    if stated not in PRECISIONS:
        raise UserError(f"trainer.precision={stated}: take one of {', '.join(PRECISIONS)}.")
    if stated != "auto":
        return stated
    if plan.accelerator != "gpu":
        return "32-true"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "16-mixed" if able.scales_losses else "32-true"


def build_trainer(
    plan: RunPlan, strategy: Any, callbacks: list[Any], loggers: list[Any], data: Any, *, trainable: bool = True
) -> pl.Trainer:
    """
    Args:
        data: placed on this rank, or a data module of Lightning's own kind.
        trainable: False for an evaluation.
    """
    own, cluster = plan.trainer, plan.cluster
    if own["log_every_n_steps"] < 1:
        raise UserError(f"trainer.log_every_n_steps={own['log_every_n_steps']}: give a whole number from 1 on.")
    # What Lightning's Trainer does not know is ours or the strategy's.
    known = inspect.signature(pl.Trainer).parameters.keys() - set(OWN_TRAINER_KEYS)
    arguments = {key: value for key, value in own.items() if key in known}
    if own.get("profiler"):
        arguments["profiler"] = _profiler(own["profiler"], plan)
    arguments.update(_limits(plan, data, trainable=trainable), accumulate_grad_batches=plan.batch.accumulate)
    if isinstance(every := arguments["val_check_interval"], int) and hasattr(data, "place"):
        callbacks = [ValidationInterval(every), *callbacks]
    plugins: list[Any] = [StartedRanks(cluster), CheckpointFiles(), *build(own.get("plugins") or [])]
    able = capabilities(strategy)
    precision: Any = precision_of(plan, able)
    if plugin := able.precision_for(precision, "cuda" if plan.accelerator == "gpu" else "cpu"):
        plugins.append(plugin)
        precision = None
    try:
        trainer = pl.Trainer(
            accelerator=plan.accelerator,
            devices=cluster.devices,
            num_nodes=cluster.num_nodes,
            strategy=strategy,
            precision=precision,
            plugins=plugins,
            callbacks=callbacks,
            logger=loggers,
            deterministic=plan.accelerator == "cpu" if own["deterministic"] == "auto" else own["deterministic"],
            default_root_dir=str(plan.folder.path),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
            enable_model_summary=any(isinstance(callback, ModelSummary) for callback in callbacks),
            use_distributed_sampler=not hasattr(data, "place") and own.get("use_distributed_sampler", True),
            **arguments,
        )
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"trainer: {error}") from None
    silence_lightning(trainer)
    return trainer


def _limits(plan: RunPlan, data: Any, *, trainable: bool) -> dict[str, Any]:
    """Return limits of an epoch in whole optimizer steps, and the interval of validations in micro-batches."""
    own, accumulate = plan.trainer, plan.batch.accumulate
    if not hasattr(data, "place"):
        if plan.cluster.is_rank_zero and plan.cluster.world_size > 1:
            log.info("Lightning's samplers spread the data: in an evaluation some samples may count twice.")
        return {}
    limits: dict[str, Any] = {} if data.num_val else {"limit_val_batches": 0.0}
    if not trainable:
        return {**limits, "val_check_interval": 1.0}
    batches = data.num_train // data.global_batch_size * accumulate
    limit = whole_steps(own["limit_train_batches"], batches, accumulate)
    cut = own.get("overfit_batches") or limit
    batches = cut if isinstance(cut, int) else int(cut * batches)
    interval = validation_interval(own["val_check_interval"], batches, accumulate)
    return {**limits, "limit_train_batches": limit, "val_check_interval": interval}


def _profiler(stated: Any, plan: RunPlan) -> Profiler:
    """Return a profiler that writes into the run folder; Lightning's default would only log its table."""
    if isinstance(stated, dict):
        profiler: Profiler = build(stated, {"dirpath": plan.folder.path, "filename": "profile"})
        return profiler
    if stated not in PROFILERS:
        raise UserError(f"trainer.profiler={stated}: take {', '.join(PROFILERS)} or null.")
    return PROFILERS[stated](dirpath=plan.folder.path, filename="profile")
