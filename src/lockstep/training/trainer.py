"""Plan → Lightning's Trainer with the strategy and the precision of the run."""

import inspect
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lockstep.callbacks.checkpoint_io import CheckpointFiles
from lockstep.callbacks.interruption import silence_lightning
from lockstep.config.instantiate import build
from lockstep.launch.plan import RunPlan
from lockstep.runs.errors import UserError
from lockstep.strategies.base import Capabilities, capabilities
from lockstep.training.rank import StartedRanks, device_of

PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler}
PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
OWN_TRAINER_KEYS = ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic",
                    "max_time", "val_check_interval")  # fmt: skip


def precision_of(plan: RunPlan, able: Capabilities) -> str:
    """auto: bf16 where the hardware has it, else fp16 on a GPU where the strategy scales losses; fp32 on the CPU.

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
    plan: RunPlan,
    strategy: Any,
    callbacks: list[Any],
    loggers: list[Any],
    root: Path,
    limits: Mapping[str, float] | None = None,
    use_distributed_sampler: bool = False,
) -> pl.Trainer:
    """
    Args:
        root: where a profiler's table goes.
        limits: limit_train_batches and limit_val_batches in place of the config's, where they are given, and
            val_check_interval in micro-batches.
    """
    own, cluster = plan.trainer, plan.cluster
    if own["log_every_n_steps"] < 1:
        raise UserError(f"trainer.log_every_n_steps={own['log_every_n_steps']}: give a whole number from 1 on.")
    # What Lightning's Trainer does not know is ours or the strategy's.
    known = inspect.signature(pl.Trainer).parameters.keys() - set(OWN_TRAINER_KEYS)
    arguments = {key: value for key, value in own.items() if key in known}
    if name := own.get("profiler"):
        arguments["profiler"] = _profiler(name, root)
    arguments.update(limits or {}, accumulate_grad_batches=plan.batch.accumulate)
    device_type = "cuda" if plan.accelerator == "gpu" else "cpu"
    plugins: list[Any] = [StartedRanks(cluster), CheckpointFiles()]
    able = capabilities(strategy)
    precision: Any = precision_of(plan, able)
    if plugin := able.precision_for(precision, device_type):
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
            default_root_dir=str(root),
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
            enable_progress_bar=any(isinstance(callback, ProgressBar) for callback in callbacks),
            enable_model_summary=any(isinstance(callback, ModelSummary) for callback in callbacks),
            use_distributed_sampler=use_distributed_sampler,
            **arguments,
        )
    except MisconfigurationException as error:
        raise UserError(f"trainer: {error}") from None
    silence_lightning(trainer)
    return trainer


def _profiler(name: str, root: Path) -> Profiler:
    """Its table goes to the run folder: Lightning would say it in a log that nobody reads."""
    if name not in PROFILERS:
        raise UserError(f"trainer.profiler={name}: take {', '.join(PROFILERS)} or null.")
    return PROFILERS[name](dirpath=root, filename="profile")


def build_strategy(plan: RunPlan) -> Any:
    """The trainer's strategy; "auto", Lightning's, for one process on one device.

    Raises:
        UserError: it cannot do what the trainer's options ask for, or this machine lacks what it needs.
    """
    own = plan.trainer
    known = {"timeout": timedelta(seconds=own["timeout_s"]), "device": device_of(plan)}
    node = own["strategy"] or ({"_target_": "lockstep.strategies.ddp.DDP"} if plan.cluster.world_size > 1 else None)
    strategy = build(node, known) if node else "auto"
    able = capabilities(strategy)
    if own["compile"] and not able.supports_compile:
        raise UserError("trainer.compile=true needs one device a process: leave it out, or choose ddp or fsdp.")
    if own["ema_decay"] and able.no_ema:
        raise UserError(
            f"trainer.ema_decay={own['ema_decay']} cannot average weights under {type(strategy).__name__}, where "
            f"{able.no_ema}: leave it out, or choose trainer=ddp (on CPUs ddp_sim)."
        )
    return strategy
