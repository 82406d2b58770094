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
from lockstep.ranks.collectives import gather_objects
from lockstep.runs.join import StartedRanks
from lockstep.runs.run import Run
from lockstep.strategies.base import capabilities

log = logging.getLogger(__name__)

PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
# Lightning's short names.
PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
# Arguments of Lightning's Trainer that are derived here.
DERIVED_ARGUMENTS = (
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "precision",
    "sync_batchnorm",
    "deterministic",
    "max_time",
    "plugins",
    "use_distributed_sampler",
)


def build_trainer(
    run: Run, strategy: Any, callbacks: list[Any], loggers: list[Any], data: Any, *, trainable: bool
) -> pl.Trainer:
    """Build the Trainer of one rank.

    Args:
        data: Lockstep's data module, attached to the ranks, or any other one.
        trainable: False for an evaluation.

    Raises:
        UserError: the Trainer refuses an option of trainer=, or it does not fit the data.
    """
    options = run.trainer_config
    if options["log_every_n_steps"] < 1:
        raise UserError(
            f"trainer.log_every_n_steps={options['log_every_n_steps']}: give a whole number from 1 "
            "on."
        )

    is_gpu = run.cluster.accelerator == "gpu"
    arguments = _passed_arguments(run)
    if hasattr(data, "attach_to_ranks"):
        arguments |= _batch_limits(run, data, trainable=trainable)
        arguments["use_distributed_sampler"] = False
        interval = arguments["val_check_interval"]
        if isinstance(interval, int):
            callbacks = [ValidationInterval(interval), *callbacks]
    else:
        arguments["use_distributed_sampler"] = options.get("use_distributed_sampler", True)
        if run.cluster.is_rank_zero and run.cluster.world_size > 1:
            log.info(
                "Lightning's samplers spread the DataLoaders: in an evaluation some samples may "
                "count twice."
            )

    plugins: list[Any] = [StartedRanks(run.cluster), CheckpointFiles()]
    plugins += build(options.get("plugins") or [])
    strategy_capabilities = capabilities(strategy)
    precision: str | None = agree_on_precision(
        str(options["precision"]), is_gpu=is_gpu, scales_losses=strategy_capabilities.scales_losses
    )
    # Lightning takes either the name of a precision or a plugin, which some strategies bring.
    precision_plugin = strategy_capabilities.precision_for(precision, "cuda" if is_gpu else "cpu")
    if precision_plugin:
        plugins.append(precision_plugin)
        precision = None
    deterministic = options["deterministic"]
    if deterministic == "auto":
        deterministic = not is_gpu

    try:
        return pl.Trainer(
            accelerator=run.cluster.accelerator,
            devices=run.cluster.ranks_per_node,
            num_nodes=run.cluster.num_nodes,
            strategy=strategy,
            precision=precision,
            plugins=plugins,
            callbacks=callbacks,
            logger=loggers,
            deterministic=deterministic,
            default_root_dir=str(run.folder.path),
            enable_checkpointing=_has_callback(callbacks, Checkpoint),
            enable_progress_bar=_has_callback(callbacks, ProgressBar),
            enable_model_summary=_has_callback(callbacks, ModelSummary),
            **arguments,
        )
    except (MisconfigurationException, ValueError, TypeError) as error:
        raise UserError(f"trainer: {error}") from None


def _passed_arguments(run: Run) -> dict[str, Any]:
    """Return the Trainer arguments that trainer= names, the accumulation and the profiler."""
    names = inspect.signature(pl.Trainer).parameters.keys() - set(DERIVED_ARGUMENTS)
    arguments = {key: value for key, value in run.trainer_config.items() if key in names}
    arguments["accumulate_grad_batches"] = run.batch.accumulate
    arguments["profiler"] = _profiler(run)
    return arguments


def _has_callback(callbacks: list[Any], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def agree_on_precision(name: str, *, is_gpu: bool, scales_losses: bool) -> str:
    """Return the precision of all ranks, whose GPUs may differ; a collective on GPUs."""
    has_bf16 = is_gpu and all(gather_objects(_has_bf16()))
    return resolve_precision(name, is_gpu=is_gpu, scales_losses=scales_losses, has_bf16=has_bf16)


def _has_bf16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def resolve_precision(
    name: str, *, is_gpu: bool, scales_losses: bool = True, has_bf16: bool | None = None
) -> Any:
    """Return Lightning's name of a precision.

    The name auto means bf16 on a GPU that has it, fp16 on another one, and fp32 on a CPU.

    Args:
        scales_losses: the strategy can train in fp16.
        has_bf16: the GPUs have it; None: ask this process's.
    """
    if name != "auto":
        return PRECISIONS.get(name, name)
    if not is_gpu:
        return "32-true"
    if has_bf16 is None:
        has_bf16 = _has_bf16()
    if has_bf16:
        return "bf16-mixed"
    return "16-mixed" if scales_losses else "32-true"


def _profiler(run: Run) -> Any:
    """Return a profiler that writes into the run folder; Lightning's would only log its table."""
    profiler = run.trainer_config.get("profiler")
    output = {"dirpath": run.folder.path, "filename": "profile"}
    if not profiler:
        return None
    if isinstance(profiler, dict):
        return build(profiler, output)
    if profiler not in PROFILERS:
        raise UserError(f"trainer.profiler={profiler}: take {', '.join(PROFILERS)} or null.")
    return PROFILERS[profiler](**output)


def _batch_limits(run: Run, data: Any, *, trainable: bool) -> dict[str, Any]:
    """Return an epoch's limits in whole steps, and the validations' interval in micro-batches."""
    limits: dict[str, Any] = {"val_check_interval": 1.0}
    if not data.num_val:
        limits["limit_val_batches"] = 0.0
    if not trainable:
        return limits

    options = run.trainer_config
    accumulate = run.batch.accumulate
    batches = data.steps_per_epoch * accumulate
    limit = round_to_whole_steps(options["limit_train_batches"], batches, accumulate)
    overfit = options.get("overfit_batches")
    batches_of_epoch = overfit or limit
    if not isinstance(batches_of_epoch, int):
        batches_of_epoch = int(batches_of_epoch * batches)
    if overfit and not batches_of_epoch:
        raise UserError(f"trainer.overfit_batches={overfit} leaves no batch: give at least 1.")
    limits["limit_train_batches"] = limit
    limits["val_check_interval"] = validation_interval(
        options["val_check_interval"], batches_of_epoch, accumulate
    )
    return limits


def round_to_whole_steps(limit: float, batches: int, accumulate: int) -> float:
    """Return trainer.limit_train_batches so that an epoch ends with a whole optimizer step.

    A limit of 10 becomes 8 where a step accumulates 4 micro-batches.

    Args:
        limit: a share (float) or number (int) of `batches`, the micro-batches of an epoch.

    Raises:
        UserError: not even one step fits.
    """
    if not limit:
        return limit
    num_batches = min(limit, batches) if isinstance(limit, int) else int(limit * batches)
    if num_batches < accumulate:
        raise UserError(
            f"trainer.limit_train_batches={limit} leaves {num_batches} micro-batches and a step "
            f"takes {accumulate}: give at least {accumulate}."
        )
    incomplete = num_batches % accumulate
    return num_batches - incomplete if incomplete else limit


def validation_interval(interval: float, batches: int, accumulate: int) -> float:
    """Return trainer.val_check_interval as Lightning counts it: in micro-batches (int).

    It is 1.0 for an epoch's end only.

    Args:
        interval: a share of an epoch (float), or optimizer steps (int).
        batches: micro-batches of an epoch, whole steps.

    Raises:
        UserError: it is neither, or more steps than an epoch has.
    """
    steps = batches // accumulate
    if not _is_valid_interval(interval, steps):
        raise UserError(
            f"trainer.val_check_interval={interval}: give a share of an epoch above 0 and up to "
            f"1.0, or a whole number of optimizer steps from 1 to {steps}, which is an epoch "
            "(trainer.check_val_every_n_epoch for more)."
        )
    if isinstance(interval, float):
        # A share is rounded up; 1e-9 keeps 0.1 × 30 at 3 steps in spite of floating point.
        interval_steps = math.ceil(interval * steps - 1e-9)
    else:
        interval_steps = interval
    return 1.0 if interval_steps >= steps else interval_steps * accumulate


def _is_valid_interval(interval: Any, steps: int) -> bool:
    if isinstance(interval, bool) or not isinstance(interval, int | float):
        return False
    largest = 1 if isinstance(interval, float) else steps
    return 0 < interval <= largest
