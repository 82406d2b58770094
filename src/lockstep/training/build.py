"""Build the parts of a run that follow from its plan: strategy, net, loggers, callbacks, Trainer, and all together."""

import inspect
import logging
import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelSummary, ProgressBar
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lockstep.callbacks.checkpoint_io import CheckpointFiles
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.interruption import MaxTime, silence_lightning
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.training_log import TrainingLog, ValidationInterval
from lockstep.config.instantiate import build
from lockstep.launch.plan import RunPlan, as_run
from lockstep.runs.config import seconds_of
from lockstep.runs.errors import UserError
from lockstep.storage.load import Checkpoint as CheckpointContent
from lockstep.strategies.base import capabilities
from lockstep.strategies.data_parallel import DataParallel
from lockstep.strategies.model_parallel import ModelParallel
from lockstep.strategies.recompute import recompute_activations
from lockstep.strategies.sync_batchnorm import check_batch_norm, synchronise
from lockstep.training.build_data import DataFacts, build_data, data_facts
from lockstep.training.build_module import build_module
from lockstep.training.rank import RankSession, StartedRanks, device_of
from lockstep.training.weights import check_fits, facts_of, load_weights

log = logging.getLogger(__name__)

TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
OF_IMAGES = ("mean", "std", "crop_pct", "interpolation")  # options of the data that a checkpoint has resolved
PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}  # Lightning's short names
# Arguments that are derived here; what Lightning's Trainer does not know is ours or the strategy's.
DERIVED = ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic",
           "max_time", "plugins", "use_distributed_sampler")  # fmt: skip


def build_run(
    session: RankSession, checkpoint: CheckpointContent | None = None
) -> tuple[pl.Trainer, Any, Any, RunRecorder]:
    """Build what one rank trains or, given a checkpoint, evaluates.

    Returns:
        Trainer, LightningModule, data module, and the callback that writes run.json.
    """
    plan, trainable = session.plan, checkpoint is None
    strategy, recorder = build_strategy(plan), RunRecorder(plan.folder.record)
    trained_on = None if checkpoint is None else facts_of(checkpoint)
    data = build_data(plan, session, trained_on)
    facts = data_facts(data)
    if trained_on and "class_counts" in trained_on:
        facts["class_counts"] = trained_on["class_counts"]
    has_weights, rates = bool(plan.checkpoint), plan.learning_rates
    module = build_module(plan.config, facts, trainable=trainable, has_checkpoint=has_weights, learning_rates=rates)
    if checkpoint is None:
        prepare_net(module, data, plan, strategy)
        load_weights(module, facts, plan)
        torch.manual_seed(plan.config["seed"] + 7919 * plan.cluster.rank)  # dropout differs between ranks
    else:
        check_fits(module, checkpoint["state_dict"], str(plan.checkpoint), plan.model_name)
        module.load_state_dict(checkpoint["state_dict"])
    callbacks = build_callbacks(plan, session, recorder, facts, trainable=trainable)
    loggers = build_loggers(plan) if trainable else []
    trainer = build_trainer(plan, strategy, callbacks, loggers, data, trainable=trainable)
    return trainer, module, data, recorder


def build_strategy(plan: RunPlan) -> Any:
    """Return the trainer's strategy; "auto", Lightning's, for one process on one device.

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


def prepare_net(module: Any, data: Any, plan: RunPlan, strategy: Any) -> None:
    """Change the net as the trainer's options say: synchronised BatchNorm, recomputed activations, torch.compile.

    Raises:
        UserError: the strategy spreads a net that the module does not have, or BatchNorm would get single images.
    """
    own, cluster = plan.trainer, plan.cluster
    if not hasattr(module, "net") and isinstance(strategy, ModelParallel | DataParallel):
        raise UserError(
            f"trainer={plan.choices.get('trainer')} spreads the attribute `net` of a LightningModule, which "
            f"{type(module).__name__} lacks: name its network self.net, or choose trainer=ddp (on CPUs ddp_sim)."
        )
    net = getattr(module, "net", module)
    if own["sync_batchnorm"] and cluster.world_size > 1:
        synchronise(net, "cuda" if plan.accelerator == "gpu" else "cpu")
    if own.get("activation_checkpointing"):
        recompute_activations(net)
    if own["compile"]:
        net.compile(**(own["compile"] if isinstance(own["compile"], Mapping) else {}))
    if not hasattr(data, "place"):
        return  # its batch size is not known
    if hasattr(net, "init_from_images"):
        net.init_from_images(data.sample_images(5000))
    parts = plan.batch.accumulate * capabilities(strategy).micro_batches
    images = plan.batch.global_size // (cluster.world_size * parts) * getattr(data, "views", 1)
    for sentence in check_batch_norm(
        net, images=images, world_size=cluster.world_size, micro_batches=parts, synchronised=own["sync_batchnorm"]
    ):
        if cluster.is_rank_zero:
            log.info(sentence)


def build_loggers(plan: RunPlan) -> list[Any]:
    """Return Lockstep's loggers and Lightning's, whose `run_id` would name a run that exists already (MLflow)."""
    folder, step = plan.folder, plan.resume_step
    lightnings = {"save_dir": str(folder.path), "id": folder.run_id, "run_name": folder.run_id}
    others = {"path": folder.metrics, "resume_step": step, "run_folder": folder.path, "run_id": folder.run_id}
    loggers = []
    for name, node in (plan.config["logger"] or {}).items():
        if not node:
            continue
        if node["_target_"] == TENSORBOARD and step is not None:
            node = {"purge_step": step + 1, **node}  # hides what steps that were lost had written
        try:
            loggers.append(build(node, lightnings if node["_target_"].startswith("lightning.") else others))
        except ModuleNotFoundError as error:
            raise UserError(f"logger {name}: {error}") from None
    return loggers


def build_callbacks(
    plan: RunPlan, session: RankSession, recorder: RunRecorder, facts: DataFacts, *, trainable: bool
) -> list[Any]:
    """Return Lockstep's callbacks and the config's, in the order in which they are called."""
    folder, own, config = plan.folder, plan.trainer, as_run(plan)
    config["data"].update({key: facts[key] for key in OF_IMAGES if key in facts})
    given = {
        "folder": folder.checkpoints, "contents": {"config": config, "data": facts}, "run_folder": folder.path,
        "run_id": folder.run_id, "global_batch_size": plan.batch.global_size if "data_hash" in facts else None,
    }  # fmt: skip
    chosen = [build(node, given) for node in (plan.config["callbacks"] or {}).values() if node]
    for callback in chosen:
        if not isinstance(callback, pl.Callback):
            raise UserError(f"callbacks: {type(callback).__name__} is no callback of Lightning's.")
    if any(isinstance(callback, ProgressBar) for callback in chosen):
        chosen = [callback for callback in chosen if not isinstance(callback, Progress)]
    chosen.sort(key=lambda callback: isinstance(callback, Checkpoints))  # last: it saves the states of the others
    if trainable and (plan.config.get("s3") or {}).get("uri"):
        from lockstep.callbacks.s3_upload import S3Upload

        chosen.append(S3Upload(folder.path, **plan.config["s3"]))
    first: list[Any] = []  # others go by what these decide
    if trainable and own["max_time"]:
        seconds = seconds_of(own["max_time"], "trainer.max_time")
        first.append(MaxTime(seconds, recorder.elapsed, session.interruption))
    if own["ema_decay"]:
        from lockstep.callbacks.weight_average import WeightAverage

        first.append(WeightAverage(own["ema_decay"], device_of(plan)))
    if session.hang_dump is not None:
        first.append(session.hang_dump)
    return [*first, TrainingLog(given["global_batch_size"]), *chosen, session.interruption, recorder]


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
    if hasattr(data, "place"):
        arguments.update(_limits(plan, data, trainable=trainable))
        if isinstance(every := arguments["val_check_interval"], int):
            callbacks = [ValidationInterval(every), *callbacks]
    elif cluster.is_rank_zero and cluster.world_size > 1:
        log.info("Lightning's samplers spread the data: in an evaluation some samples may count twice.")
    plugins: list[Any] = [StartedRanks(cluster), CheckpointFiles(), *build(own.get("plugins") or [])]
    precision: Any = PRECISIONS.get(str(own["precision"]), str(own["precision"]))
    if precision == "auto":
        precision = "32-true"
        if plan.accelerator == "gpu":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            precision = "bf16-mixed" if has_bf16 else "16-mixed" if able.scales_losses else "32-true"
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
    limits: dict[str, Any] = {} if data.num_val else {"limit_val_batches": 0.0}
    if not trainable:
        return {**limits, "val_check_interval": 1.0}
    batches = data.num_train // data.global_batch_size * accumulate
    limit = whole_steps(own["limit_train_batches"], batches, accumulate)
    cut = own.get("overfit_batches") or limit
    batches = cut if isinstance(cut, int) else int(cut * batches)
    interval = validation_interval(own["val_check_interval"], batches, accumulate)
    return {**limits, "limit_train_batches": limit, "val_check_interval": interval}


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


def _profiler(stated: Any, plan: RunPlan) -> Profiler | None:
    """Return a profiler that writes into the run folder; Lightning's default would only log its table."""
    place = {"dirpath": plan.folder.path, "filename": "profile"}
    if isinstance(stated, dict) or not stated:
        profiler: Profiler | None = build(stated, place) if stated else None
        return profiler
    if stated not in PROFILERS:
        raise UserError(f"trainer.profiler={stated}: take {', '.join(PROFILERS)} or null.")
    return PROFILERS[stated](**place)
