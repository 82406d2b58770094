"""Build the parts of a run: strategy, data, module, callbacks, loggers and Lightning's Trainer.

The record of the run gets facts about them once they are built.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ProgressBar, StochasticWeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.doubts import Doubts
from lockstep.callbacks.interruption import MaxTime
from lockstep.callbacks.pictures import Pictures
from lockstep.callbacks.progress import Progress
from lockstep.callbacks.run_recorder import RunRecorder, parameter_counts
from lockstep.callbacks.training_log import TrainingLog
from lockstep.checkpoints.load import Checkpoint, load_on_all_ranks
from lockstep.config.instantiate import build as build_node
from lockstep.config.instantiate import parameters_of
from lockstep.data.report import collect_settings
from lockstep.loggers.experiment import SkippingLogger, skip_other_methods
from lockstep.process.errors import UserError
from lockstep.records.config import model_name, parse_seconds
from lockstep.records.trial import Trial
from lockstep.runs.join import device_of
from lockstep.runs.run import Run
from lockstep.strategies.base import capabilities
from lockstep.strategies.ddp import DDP
from lockstep.strategies.recompute import recompute_activations
from lockstep.strategies.sync_batchnorm import check_batch_norm, synchronise
from lockstep.training.build_data import (
    IMAGE_SETTINGS,
    DataFacts,
    build_data,
    data_facts,
    start_data_report,
)
from lockstep.training.build_module import build_module
from lockstep.training.compilation import EagerEvaluation, compile_net, should_compile
from lockstep.training.data_report import DataReport
from lockstep.training.task import Task
from lockstep.training.trainer import build_trainer
from lockstep.training.weights import check_fits, facts_of, load_or_check_weights

log = logging.getLogger(__name__)

# Facts about training images, which an evaluation takes from the checkpoint.
TRAINING_IMAGE_FACTS = ("class_counts", "target_mean", "target_std")
IMAGES_FOR_INITIALISATION = 5000
# The seeds of dropout differ by this much between ranks.
RANK_SEED_STEP = 7919
RUN_VALUE = re.compile(r"\$\{run:(\w+)\}")


class Parts(NamedTuple):
    """The parts that Lightning trains or evaluates on one rank.

    Args:
        data: None if the module has its own loaders.
    """

    trainer: pl.Trainer
    module: pl.LightningModule
    data: pl.LightningDataModule | None


def build(run: Run, checkpoint: Checkpoint | None = None) -> Parts:
    """Build what one rank trains or, given a checkpoint, evaluates.

    The callback that writes run.json becomes `run.recorder`.
    """
    is_training = checkpoint is None
    initial_checkpoint = None
    if is_training and run.checkpoint:
        initial_checkpoint = load_on_all_ranks(run.checkpoint)
    checkpoint_facts = facts_of(checkpoint or initial_checkpoint or {})

    strategy = build_strategy(run)
    data = build_data(run, checkpoint_facts, is_training=is_training)
    data_report = start_data_report(data, run, is_training=is_training)
    facts = data_facts(data)
    if not is_training:
        facts |= {
            name: checkpoint_facts[name]
            for name in TRAINING_IMAGE_FACTS
            if name in checkpoint_facts
        }

    module = build_module(
        run.config,
        facts,
        trainable=is_training,
        has_checkpoint=bool(run.checkpoint),
        learning_rates=run.learning_rates,
    )
    if data is None:
        _check_loaders(module, run)
    is_compiled = False
    if checkpoint is None:
        _refuse_automatic_options(module, run)
        is_compiled = should_compile(module, data, run, strategy)
        prepare_net(module, data, run, strategy, is_compiled)
        if initial_checkpoint is not None:
            load_or_check_weights(module, initial_checkpoint, facts, run)
        # What is drawn from here on does not depend on the numbers that the weights took.
        reset_seed()
    else:
        _load_task_weights(module, checkpoint, run)

    run.recorder = RunRecorder(run.folder.record_path, owns_run=False)
    callbacks = build_callbacks(run, facts, data_report, is_training=is_training)
    if is_compiled:
        callbacks.append(EagerEvaluation())
    loggers = build_loggers(run) if is_training else [SkippingLogger(str(run.folder.path))]
    trainer = build_trainer(run, strategy, callbacks, loggers, data, trainable=is_training)
    return Parts(trainer, module, data)


def _load_task_weights(module: Any, checkpoint: Checkpoint, run: Run) -> None:
    """Load the weights of a task; Lightning loads those of others, whose hooks may make layers."""
    if isinstance(module, Task):
        check_fits(module, checkpoint["state_dict"], str(run.checkpoint), model_name(run.config))
        module.load_state_dict(checkpoint["state_dict"])


def _refuse_automatic_options(module: Any, run: Run) -> None:
    """Refuse accumulation and clipping for a module that calls its optimizer itself."""
    if module.automatic_optimization:
        return
    name = type(module).__name__
    if run.batch.accumulate > 1:
        raise UserError(
            f"{name} calls its optimizer itself, so it cannot accumulate the gradients of "
            f"{run.batch.accumulate} batches: give trainer.accumulate_grad_batches=1."
        )
    if run.trainer_config["gradient_clip_val"]:
        raise UserError(
            f"{name} calls its optimizer itself: leave trainer.gradient_clip_val out, and call "
            "self.clip_gradients in its training_step."
        )


def _check_loaders(module: Any, run: Run) -> None:
    """Raise UserError if there is no data module, and the module has no loaders either."""
    name = type(module).__name__
    if not is_overridden("train_dataloader", module):
        raise UserError(
            f"data=none, and {name} has no train_dataloader. Pass data=NAME, or "
            "data._target_=package.DataModule."
        )
    if run.cluster.is_rank_zero:
        log.info(f"data=none: {name} has its own loaders.")


def build_strategy(run: Run) -> Any:
    """Return the trainer's strategy. One process on one device has Lightning's "auto".

    Raises:
        UserError: it cannot do what the trainer's options ask for, or this machine lacks what it
            needs.
    """
    options = run.trainer_config
    strategy: Any = "auto"
    if options["strategy"]:
        strategy = build_node(options["strategy"])
    elif run.cluster.world_size > 1:
        strategy = DDP()

    strategy_capabilities = capabilities(strategy)
    is_compiled = options["compile"] not in (False, None, "auto")
    if is_compiled and not strategy_capabilities.supports_compile:
        raise UserError(
            "trainer.compile=true needs one device a process: leave it out, or choose ddp or fsdp."
        )
    if options["ema_decay"] and strategy_capabilities.no_ema:
        raise UserError(
            f"trainer.ema_decay={options['ema_decay']} cannot average weights under "
            f"{type(strategy).__name__}, where {strategy_capabilities.no_ema}: leave it out, or "
            "choose trainer=ddp (on CPUs ddp_sim)."
        )
    parts = strategy_capabilities.micro_batches * strategy_capabilities.replicas
    if options["sync_batchnorm"] and parts > 1:
        raise UserError(
            f"trainer.sync_batchnorm=true joins ranks, and {type(strategy).__name__} normalises "
            f"each of {parts} parts of a batch by itself: leave it out, or choose trainer=ddp."
        )
    return strategy


def prepare_net(module: Any, data: Any, run: Run, strategy: Any, is_compiled: bool) -> None:
    """Synchronise BatchNorm, recompute activations and compile, as the trainer's options say.

    Raises:
        UserError: the strategy spreads a net that the module does not have, or BatchNorm would get
            single images.
    """
    options = run.trainer_config
    if not hasattr(module, "net") and capabilities(strategy).spreads_net:
        raise UserError(
            f"trainer={run.choices.get('trainer')} spreads the attribute `net` of a "
            f"LightningModule, which {type(module).__name__} lacks: name its network self.net, or "
            "choose trainer=ddp (on CPUs ddp_sim)."
        )

    net = getattr(module, "net", module)
    if options["sync_batchnorm"] and run.cluster.world_size > 1:
        # Heads and projections beside the net have BatchNorm, too.
        synchronise(module, "cuda" if run.cluster.accelerator == "gpu" else "cpu")
    if options.get("activation_checkpointing"):
        recompute_activations(net)
    if is_compiled:
        compile_net(net, run, strategy)

    # The batch size of a data module that is not Lockstep's is not known.
    if hasattr(data, "attach_to_ranks"):
        if hasattr(net, "init_from_images"):
            net.init_from_images(data.sample_images(IMAGES_FOR_INITIALISATION))
        _check_batch_norm(module, data, run, strategy)


def _check_batch_norm(module: Any, data: Any, run: Run, strategy: Any) -> None:
    """Refuse BatchNorm over single images, and log if its result depends on the ranks."""
    can = capabilities(strategy)
    parts = run.batch.accumulate * can.micro_batches * can.replicas
    images = run.batch.global_size // (run.cluster.world_size * parts) * getattr(data, "views", 1)
    note = check_batch_norm(
        module,
        images=images,
        world_size=run.cluster.world_size,
        micro_batches=parts,
        synchronised=run.trainer_config["sync_batchnorm"],
    )
    if note and run.cluster.is_rank_zero:
        log.info(note)


def build_loggers(run: Run) -> list[Any]:
    """Return the loggers of the config.

    The one that was chosen last comes first, so that it is the module's `self.logger`.
    """
    step = run.resume_step
    values = {
        "folder": str(run.folder.path),
        "id": run.folder.run_id,
        "metrics": run.folder.metrics,
        # TensorBoard hides what the lost steps have written.
        "purge_step": None if step is None else step + 1,
    }
    loggers = []
    for name, node in (run.config["logger"] or {}).items():
        if not node:
            continue
        try:
            logger = build_part(node, values, f"logger.{name}")
        except ModuleNotFoundError as error:
            raise UserError(f"logger {name}: {error}") from None
        skip_other_methods(logger, name)
        loggers.append(logger)
    return loggers[::-1]


def build_callbacks(
    run: Run, facts: DataFacts, data_report: DataReport | None, *, is_training: bool
) -> list[pl.Callback]:
    """Return Lockstep's callbacks and the config's, in the order in which they are called."""
    batch_size = run.batch.global_size if "data_hash" in facts else None
    # These run first, because other callbacks read trainer.should_stop and the averaged weights.
    control_callbacks = _build_control_callbacks(run, is_training=is_training)
    if data_report is not None:
        control_callbacks.append(data_report)
    config_callbacks = _build_config_callbacks(run, facts, batch_size)
    if run.config["pictures"]:
        config_callbacks.append(Pictures(run.folder.path))
    # The checkpoints come after the others, because they save their states.
    config_callbacks.sort(key=lambda callback: isinstance(callback, Checkpoints))
    if is_training and (run.config.get("s3") or {}).get("uri"):
        from lockstep.callbacks.s3_upload import S3Upload

        config_callbacks.append(S3Upload(run.folder.path, **run.config["s3"]))
    return [
        *control_callbacks,
        TrainingLog(batch_size),
        Doubts(),
        *config_callbacks,
        run.interruption,
        run.recorder,
    ]


def _build_control_callbacks(run: Run, *, is_training: bool) -> list[pl.Callback]:
    """Return the callbacks whose changes of a training other callbacks see.

    They end it after its time, prune a trial, average the weights and report a rank that hangs.
    """
    options = run.trainer_config
    callbacks: list[pl.Callback] = []
    if is_training and run.cluster.rank:
        callbacks.append(RankSeed(run.config["seed"] + RANK_SEED_STEP * run.cluster.rank))
    if is_training and options["max_time"]:
        seconds = parse_seconds(options["max_time"], "trainer.max_time")
        callbacks.append(MaxTime(seconds, run.recorder.elapsed, run.interruption))
    trial = run.config.get("trial")
    if is_training and trial and trial["pruner"]:
        from lockstep.callbacks.pruning import Pruning

        callbacks.append(Pruning(Trial(**trial), run.config["optimized_metric"]))
    if options["ema_decay"]:
        from lockstep.callbacks.weight_average import WeightAverage

        callbacks.append(WeightAverage(options["ema_decay"], device_of(run)))
    if run.hang_dump is not None:
        callbacks.append(run.hang_dump)
    return callbacks


def _build_config_callbacks(
    run: Run, facts: DataFacts, batch_size: int | None
) -> list[pl.Callback]:
    """Return the callbacks of the config."""
    config = run.effective_config()
    config["data"].update({key: facts[key] for key in IMAGE_SETTINGS if key in facts})
    values = {
        "folder": run.folder.path,
        "id": run.folder.run_id,
        "checkpoints": run.folder.checkpoints,
        "checkpoint_contents": {"config": config, "data": facts},
        "global_batch_size": batch_size,
    }
    callbacks = []
    for name, node in (run.config["callbacks"] or {}).items():
        if not node:
            continue
        callback = build_part(node, values, f"callbacks.{name}")
        if not isinstance(callback, pl.Callback):
            raise UserError(f"callbacks: {type(callback).__name__} is not a Lightning callback.")
        if isinstance(callback, StochasticWeightAveraging):
            raise UserError(
                "callbacks: StochasticWeightAveraging saves no average: use trainer.ema_decay."
            )
        callbacks.append(callback)

    # A progress bar of the user's takes the place of the progress line.
    if any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks = [callback for callback in callbacks if not isinstance(callback, Progress)]
    return callbacks


class RankSeed(pl.Callback):
    """Seed torch on a rank after the first, so that dropout differs between ranks.

    Lightning seeds all ranks alike when they meet, so that their data are split alike. Then the
    data are prepared, and after that this is called.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        torch.manual_seed(self.seed)


def build_part(node: Mapping[str, Any], values: Mapping[str, Any], key: str) -> Any:
    """Build a callback or a logger, whose options `${run:NAME}` become values of the run.

    Args:
        values: the run's values by name, such as folder and id.
        key: the key of the part in the config, for errors.

    Raises:
        UserError: a run has no value of that name; the error lists those that it has.
    """
    static_options: dict[str, Any] = {}
    run_options: dict[str, Any] = {}
    for name, value in node.items():
        reference = RUN_VALUE.fullmatch(value) if isinstance(value, str) else None
        if reference is None:
            static_options[name] = value
        elif reference[1] in values:
            run_options[name] = values[reference[1]]
        else:
            choices = ", ".join(f"${{run:{name}}}" for name in values)
            raise UserError(f"{key}.{name}={value}: a run has {choices}.")
    return build_node(static_options, values=run_options)


def describe_parts(run: Run, parts: Parts) -> dict[str, Any]:
    """Return the fields of run.json that are known once the parts of a run are built.

    They are the model's name, the precision (also if trainer.precision is auto), the numbers of
    parameters and images, the hash of the images and how they are preprocessed.
    """
    constructor, _ = parameters_of(type(parts.module))
    takes_model = "net" in constructor and "net" not in run.config["task"]
    record_fields = {
        "model": model_name(run.config) if takes_model else type(parts.module).__name__,
        "precision": str(parts.trainer.precision),
        **parameter_counts(parts.module),
    }
    data = parts.data
    if not hasattr(data, "attach_to_ranks"):
        # The loaders of other data modules decide the batch.
        return {**record_fields, "global_batch_size": None, "per_device_batch_size": None}
    callbacks = parts.trainer.callbacks
    data_report = next((each for each in callbacks if isinstance(each, DataReport)), None)
    return {
        **record_fields,
        "num_train": data.num_train,
        "num_val": data.num_val,
        "num_test": data.num_test,
        "left_out_per_epoch": 0 if data.sampling else data.num_train % data.global_batch_size,
        "data_hash": data.data_hash,
        "data_report": {} if data_report is None else data_report.summary,
        "images": collect_settings(data, run.choices.get("augmentation")),
    }
