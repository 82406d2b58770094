"""Build the parts of a run that follow from its plan: strategy, net, loggers, callbacks, and all together."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar, StochasticWeightAveraging

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.interruption import MaxTime
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.load import Checkpoint
from lockstep.config.instantiate import build
from lockstep.process.errors import UserError
from lockstep.records.config import model_name, seconds_of
from lockstep.runs.join import RankSession, device_of
from lockstep.runs.plan import RunPlan, as_run
from lockstep.strategies.base import capabilities
from lockstep.strategies.ddp import DDP
from lockstep.strategies.recompute import recompute_activations
from lockstep.strategies.sync_batchnorm import check_batch_norm, synchronise
from lockstep.training.build_data import DataFacts, build_data, data_facts
from lockstep.training.build_module import build_module
from lockstep.training.compilation import EagerEvaluation, compile_net, is_compiled
from lockstep.training.task import Task
from lockstep.training.trainer import build_trainer
from lockstep.training.weights import check_fits, facts_of, load_weights

log = logging.getLogger(__name__)

TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
OF_IMAGES = ("mean", "std", "crop_pct", "interpolation")  # options of the data that a checkpoint has resolved


def build_run(session: RankSession, checkpoint: Checkpoint | None = None) -> tuple[pl.Trainer, Any, Any, RunRecorder]:
    """Build what one rank trains or, given a checkpoint, evaluates.

    Returns:
        Trainer, LightningModule, data module, and the callback that writes run.json.
    """
    plan, trainable = session.plan, checkpoint is None
    strategy, recorder = build_strategy(plan), RunRecorder(plan.folder.record, owns_run=False)
    trained_on = None if checkpoint is None else facts_of(checkpoint)
    data = build_data(plan, session, trained_on)
    facts = data_facts(data)
    if trained_on and "class_counts" in trained_on:
        facts["class_counts"] = trained_on["class_counts"]
    has_weights, rates = bool(plan.checkpoint), plan.learning_rates
    module = build_module(plan.config, facts, trainable=trainable, has_checkpoint=has_weights, learning_rates=rates)
    compiled = trainable and is_compiled(module, data, plan, strategy)
    if checkpoint is None:
        prepare_net(module, data, plan, strategy, compiled)
        load_weights(module, facts, plan)
        torch.manual_seed(plan.config["seed"] + 7919 * plan.cluster.rank)  # dropout differs between ranks
    elif isinstance(module, Task):  # Lightning loads any other module, whose hooks may make layers first
        check_fits(module, checkpoint["state_dict"], str(plan.checkpoint), model_name(plan.config))
        module.load_state_dict(checkpoint["state_dict"])
    callbacks = build_callbacks(plan, session, recorder, facts, trainable=trainable)
    if compiled:
        callbacks.append(EagerEvaluation())
    loggers = build_loggers(plan) if trainable else []
    trainer = build_trainer(plan, strategy, callbacks, loggers, data, trainable=trainable)
    return trainer, module, data, recorder


def build_strategy(plan: RunPlan) -> Any:
    """Return the trainer's strategy; "auto", Lightning's, for one process on one device.

    Raises:
        UserError: it cannot do what the trainer's options ask for, or this machine lacks what it needs.
    """
    strategy: Any = "auto"
    if plan.trainer["strategy"]:
        strategy = build(plan.trainer["strategy"])
    elif plan.cluster.world_size > 1:
        strategy = DDP()

    supports = capabilities(strategy)
    is_compile_asked = plan.trainer["compile"] not in (False, None, "auto")
    if is_compile_asked and not supports.supports_compile:
        raise UserError(
            "trainer.compile=true needs one device a process: leave it out, or choose ddp or fsdp."
        )
    ema_decay = plan.trainer["ema_decay"]
    if ema_decay and supports.no_ema:
        raise UserError(
            f"trainer.ema_decay={ema_decay} cannot average weights under "
            f"{type(strategy).__name__}, where {supports.no_ema}: leave it out, or choose "
            "trainer=ddp (on CPUs ddp_sim)."
        )
    return strategy


def prepare_net(module: Any, data: Any, plan: RunPlan, strategy: Any, compiled: bool) -> None:
    """Change the net as the trainer's options say: synchronised BatchNorm, recomputed activations, torch.compile.

    Raises:
        UserError: the strategy spreads a net that the module does not have, or BatchNorm would get single images.
    """
    own, cluster = plan.trainer, plan.cluster
    if not hasattr(module, "net") and capabilities(strategy).spreads_net:
        raise UserError(
            f"trainer={plan.choices.get('trainer')} spreads the attribute `net` of a LightningModule, which "
            f"{type(module).__name__} lacks: name its network self.net, or choose trainer=ddp (on CPUs ddp_sim)."
        )
    net = getattr(module, "net", module)
    if own["sync_batchnorm"] and cluster.world_size > 1:
        synchronise(net, "cuda" if plan.accelerator == "gpu" else "cpu")
    if own.get("activation_checkpointing"):
        recompute_activations(net)
    if compiled:
        compile_net(net, plan, strategy)
    if not hasattr(data, "place"):
        return  # its batch size is not known
    if hasattr(net, "init_from_images"):
        net.init_from_images(data.sample_images(5000))
    parts = plan.batch.accumulate * capabilities(strategy).micro_batches
    images = plan.batch.global_size // (cluster.world_size * parts) * getattr(data, "views", 1)
    spread = {"world_size": cluster.world_size, "micro_batches": parts, "synchronised": own["sync_batchnorm"]}
    note = check_batch_norm(net, images=images, **spread)
    if note and cluster.is_rank_zero:
        log.info(note)


def build_loggers(plan: RunPlan) -> list[Any]:
    """Return Lockstep's loggers and Lightning's, whose `run_id` would name a run that exists already (MLflow)."""
    folder, step = plan.folder, plan.resume_step
    lightnings = {"save_dir": str(folder.path), "id": folder.run_id, "run_name": folder.run_id}
    others = {"path": folder.metrics, "run_folder": folder.path, "run_id": folder.run_id}
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
    return loggers[::-1]  # a module's self.logger is the first: the one that was chosen last, else TensorBoard's


def build_callbacks(
    plan: RunPlan, session: RankSession, recorder: RunRecorder, facts: DataFacts, *, trainable: bool
) -> list[Any]:
    """Return Lockstep's callbacks and the config's, in the order in which they are called."""
    folder, own, config = plan.folder, plan.trainer, as_run(plan)
    config["data"].update({key: facts[key] for key in OF_IMAGES if key in facts})
    batch_size = plan.batch.global_size if "data_hash" in facts else None
    given = {
        "folder": folder.checkpoints, "contents": {"config": config, "data": facts}, "run_folder": folder.path,
        "run_id": folder.run_id, "global_batch_size": batch_size,
    }  # fmt: skip
    chosen = [build(node, given) for node in (plan.config["callbacks"] or {}).values() if node]
    for callback in chosen:
        if not isinstance(callback, pl.Callback):
            raise UserError(f"callbacks: {type(callback).__name__} is not a Lightning callback.")
        if isinstance(callback, StochasticWeightAveraging):
            raise UserError("callbacks: StochasticWeightAveraging saves no average: use trainer.ema_decay.")
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
    if session.data_report is not None:
        first.append(session.data_report)
    return [*first, TrainingLog(batch_size), *chosen, session.interruption, recorder]
