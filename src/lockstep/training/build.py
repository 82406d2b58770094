"""Build the parts of a run from its plan: data module, LightningModule, callbacks, loggers, trainer."""

import logging
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.length import MaxTime, ValidationInterval
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.training_log import TrainingLog
from lockstep.config.instantiate import build
from lockstep.data import report
from lockstep.launch.plan import RunPlan, as_run
from lockstep.runs.config import Config
from lockstep.runs.durations import seconds_of
from lockstep.runs.errors import UserError
from lockstep.strategies.base import capabilities
from lockstep.strategies.data_parallel import DataParallel
from lockstep.strategies.fsdp import FSDP
from lockstep.strategies.model_parallel import ModelParallel
from lockstep.strategies.recompute import recompute_activations
from lockstep.strategies.sync_batchnorm import check_batch_norm, synchronise
from lockstep.training.build_data import build_data, build_plain_data, data_facts, has_plain_data
from lockstep.training.build_module import build_module
from lockstep.training.checks import DataFacts, check_same_data, validation_interval, whole_steps
from lockstep.training.rank import RankSession, device_of
from lockstep.training.trainer import build_strategy, build_trainer

log = logging.getLogger(__name__)

TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"


@dataclass
class Run:
    """The parts that a script fits or tests."""

    trainer: pl.Trainer
    module: pl.LightningModule
    data: Any
    facts: DataFacts
    recorder: RunRecorder
    checkpoints: Checkpoints | None


def build_run(plan: RunPlan, session: RankSession, *, trained_on: DataFacts | None = None) -> Run:
    """Build the parts of one rank.

    Args:
        trained_on: for an evaluation, what the checkpoint says of the data that it was trained on.
    """
    config, cluster, trainable = plan.config, plan.cluster, trained_on is None
    strategy = build_strategy(plan)
    plain_data = has_plain_data(config)
    data = build_plain_data(config) if plain_data else build_data(plan, trained_on)
    facts = data_facts(data)
    if trained_on and "class_counts" in trained_on:  # the weights of a weighted loss
        facts["class_counts"] = trained_on["class_counts"]
    module: Any = build_module(
        config, facts, trainable=trainable, has_checkpoint=bool(plan.checkpoint), learning_rates=plan.learning_rates
    )
    session.wait_for_all()
    if plain_data:
        limits = {"val_check_interval": plan.trainer["val_check_interval"]}
        if cluster.is_rank_zero and cluster.world_size > 1:
            log.info("Lightning's samplers spread the data: in an evaluation some samples may count twice.")
    else:
        check_same_data(facts, data, cluster)
        limits = _limits(plan, data) if trainable else {}
    if trainable:
        _prepare_net(module, plan, strategy, data)
    if cluster.is_rank_zero and not plain_data:
        data.report, lists = report.report_of(data) if trainable else ({}, {})
        report.log_contents(data, data.report)
        report.log_settings(data, plan.choices.get("augmentation") if trainable else None)
        report.write_lists(plan.folder.path, lists)
    torch.manual_seed(config["seed"] + 7919 * cluster.rank)  # dropout differs between ranks
    recorder = RunRecorder(plan.folder.record)
    callbacks = _callbacks(plan, session, recorder, facts, limits, trainable=trainable)
    loggers = build_loggers(plan) if trainable else []
    if not plain_data and not data.num_val:
        limits["limit_val_batches"] = 0.0
    trainer = build_trainer(
        plan, strategy, callbacks, loggers, plan.folder.path, limits, use_distributed_sampler=plain_data
    )
    checkpoints = next((callback for callback in callbacks if isinstance(callback, Checkpoints)), None)
    return Run(trainer, module, data, facts, recorder, checkpoints)


def _limits(plan: RunPlan, data: Any) -> dict[str, float]:
    """Return limits of an epoch in whole optimizer steps, and the interval of validations in micro-batches."""
    own, accumulate = plan.trainer, plan.batch.accumulate
    batches = data.num_train // data.global_batch_size * accumulate
    limit = whole_steps(own["limit_train_batches"], batches, accumulate)
    cut = own.get("overfit_batches") or limit
    batches = cut if isinstance(cut, int) else int(cut * batches)
    interval = validation_interval(own["val_check_interval"], batches, accumulate)
    return {"limit_train_batches": limit, "val_check_interval": interval}


def _prepare_net(module: Any, plan: RunPlan, strategy: Any, data: Any) -> None:
    own, cluster = plan.trainer, plan.cluster
    if not hasattr(module, "net") and isinstance(strategy, FSDP | ModelParallel | DataParallel):
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
        net.compile()
    if isinstance(data, pl.LightningDataModule) and not hasattr(data, "sample_images"):
        return  # its batch size is not known
    if hasattr(net, "init_from_images"):
        net.init_from_images(data.sample_images(5000))
    parts = plan.batch.accumulate * capabilities(strategy).micro_batches
    for sentence in check_batch_norm(
        net, images=plan.batch.global_size // (cluster.world_size * parts), world_size=cluster.world_size,
        micro_batches=parts, synchronised=own["sync_batchnorm"],
    ):  # fmt: skip
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


def _callbacks(
    plan: RunPlan, session: RankSession, recorder: RunRecorder, facts: DataFacts, limits: Config, *, trainable: bool
) -> list[Any]:
    """Return Lockstep's callbacks and the config's, in the order in which they are called."""
    folder, own, config = plan.folder, plan.trainer, as_run(plan)
    config["data"].update({key: facts[key] for key in ("mean", "std", "crop_pct", "interpolation") if key in facts})
    config["trainer"].update({key: limits[key] for key in ("limit_train_batches",) if key in limits})
    given = {
        "folder": folder.checkpoints, "contents": {"config": config, "data": facts}, "run_folder": folder.path,
        "run_id": folder.run_id, "global_batch_size": plan.batch.global_size if "data_hash" in facts else None,
    }  # fmt: skip
    chosen = [build(node, given) for node in (plan.config["callbacks"] or {}).values() if node]
    for callback in chosen:
        if not isinstance(callback, pl.Callback):
            raise UserError(f"callbacks: {type(callback).__name__} is no callback of Lightning's.")
    if any(isinstance(callback, pl.callbacks.ProgressBar) for callback in chosen):
        chosen = [callback for callback in chosen if not isinstance(callback, Progress)]
    chosen.sort(key=lambda callback: isinstance(callback, Checkpoints))  # last: it saves the states of the others
    if trainable and (plan.config.get("s3") or {}).get("uri"):
        from lockstep.callbacks.s3_upload import S3Upload

        chosen.append(S3Upload(folder.path, **plan.config["s3"]))
    first: list[Any] = []  # others go by what these decide
    if isinstance(limits.get("val_check_interval"), int):
        first.append(ValidationInterval(limits["val_check_interval"]))
    if trainable and own["max_time"]:
        seconds = seconds_of(own["max_time"], "trainer.max_time")
        first.append(MaxTime(seconds, recorder.elapsed, session.interruption))
    if own["ema_decay"]:
        from lockstep.callbacks.weight_average import WeightAverage

        first.append(WeightAverage(own["ema_decay"], device_of(plan)))
    if session.hang_dump is not None:
        first.append(session.hang_dump)
    return [*first, TrainingLog(given["global_batch_size"]), *chosen, session.interruption, recorder]
