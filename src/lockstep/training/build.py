"""Plan → Run(trainer, module, data): the only place where the parts of a run meet."""

import logging
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.length import MaxTime, ValidationInterval
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.training_log import TrainingLog
from lockstep.config.instantiate import build, options_of, resolve_target
from lockstep.config.schema import key_of
from lockstep.data import report
from lockstep.launch.plan import RunPlan, as_run
from lockstep.runs.config import Config
from lockstep.runs.durations import seconds_of
from lockstep.runs.errors import UserError
from lockstep.runs.hooks import SaysWantedImages, StartsFromImages
from lockstep.strategies.base import capabilities
from lockstep.strategies.recompute import recompute_activations
from lockstep.strategies.sync_batchnorm import check_batch_norm, synchronise
from lockstep.training.checks import DataFacts, check_same_data, validation_interval, whole_steps
from lockstep.training.freeze import freeze
from lockstep.training.local_root import on_this_node, said_by_address
from lockstep.training.metrics import build_metrics
from lockstep.training.parameter_groups import RULES, GroupRules
from lockstep.training.rank import RankSession, device_of
from lockstep.training.trainer import build_strategy, build_trainer

log = logging.getLogger(__name__)

CLASSIFIER = "classifier.ImageClassifier"  # of checkpoints that do not name theirs
TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
REFUSED_CALLBACKS = (pl.callbacks.ModelCheckpoint, pl.callbacks.ProgressBar)
UNSET_OF_LOSS = {
    "label_smoothing": 0.0,
    "class_weights": None,
    "gamma": 2.0,
    "target_threshold": None,
}  # of the losses of src/losses
NEW_DATA = {"data", "data.root", "data.images"}  # overrides that name other images
OF_ALL = ("fold", "num_folds", "stratify")  # in the config of any data set, which need not have them
RETIRED = ("verify", "max_pixels", "memory_limit_gib", "device_cache_gib", "cache_gib")  # options of version 1
Known = dict[str, Any]  # what the run hands to constructors, by their parameter


@dataclass
class Run:
    """What a script fits or tests."""

    trainer: pl.Trainer
    module: pl.LightningModule
    data: Any
    facts: DataFacts
    recorder: RunRecorder
    checkpoints: Checkpoints | None


def build_data(plan: RunPlan, trained_on: DataFacts | None = None) -> Any:
    """Return the data module of one rank.

    Args:
        trained_on: for an evaluation, what the checkpoint says of the data that it was trained on.
    """
    stage = "fit" if trained_on is None else "test"
    stated = {**plan.config["data"], "global_batch_size": plan.batch.global_size}
    data = prepared_data(plan.config, stated, stage)
    if trained_on:
        data.match_classes(trained_on["class_names"])
        keys, is_same = {key_of(word) for word in plan.overrides}, data.data_hash == trained_on["data_hash"]
        if keys & NEW_DATA and data.test_is_drawn and not is_same and "data.test_fraction" not in keys:
            data.test_on_all()
        elif not keys & NEW_DATA and not is_same and plan.cluster.is_rank_zero:
            log.warning("The images have changed since the training, which may have seen some of these test images.")
    data.place(
        rank=plan.cluster.rank,
        world_size=plan.cluster.world_size,
        accumulate_grad_batches=plan.batch.accumulate,
        device=device_of(plan),
    )
    return data


def prepared_data(config: Config, stated: Config, stage: str = "fit") -> Any:
    """The data module of a config, before anyone has said which rank it is of.

    Args:
        stated: its options.
        stage: fit, or test for an evaluation.
    """
    taken, any_name = options_of(resolve_target(stated["_target_"], "data._target_"))
    options = {
        key: value
        for key, value in stated.items()
        if not (key in OF_ALL and value is None) and (any_name or key not in RETIRED or key in taken)
    }
    here = on_this_node(options, config["s3"])
    with said_by_address(options, here):
        data = build(here, {"seed": config["seed"]})
        data.stage = stage
        data.use(build(config["augmentation"]), wanted_images(config["model"]))
        data.prepare()
    return data


def wanted_images(model: Config) -> dict[str, Any]:
    """How a model's pretrained weights want their images, where it has some and says so."""
    target = resolve_target(model["_target_"], "model._target_")
    if not isinstance(target, SaysWantedImages):
        return {}
    own = {key: value for key, value in model.items() if key != "_target_"}
    return target.wanted_images(**own)


def build_module(
    config: Config,
    facts: DataFacts,
    *,
    trainable: bool = True,
    has_checkpoint: bool = False,
    learning_rates: Config | None = None,
) -> pl.LightningModule:
    """The classifier for these data. The same seed gives every rank the same weights, whatever was drawn before.

    Args:
        facts: num_classes, image_size and channels.
        trainable: with an optimizer and a schedule.
        has_checkpoint: all weights come from one, so that none are fetched.
        learning_rates: in place of the optimizer's own, by option.
    """
    torch.manual_seed(config["seed"])
    shape = {name: facts[name] for name in ("num_classes", "image_size", "channels")}
    own = dict(config["model"])
    frozen = own.pop("freeze", None)
    if not trainable or has_checkpoint:  # the checkpoint brings the weights: nothing is fetched
        own.update({key: value for key, value in (("pretrained", False), ("weights", None)) if key in own})
    net = build(own, shape)
    if frozen and trainable:
        freeze(net, frozen)
    if pays_channels_last(net, config["trainer"].get("channels_last", False)):
        net = net.to(memory_format=torch.channels_last)
    if str(config["trainer"]["precision"]) in ("64-true", "64"):
        net = net.double()  # Lightning restores weights before it converts the module, and would round them
    schedule = config.get("scheduler") or {}
    optimizer = build({**_own_arguments(config["optimizer"]), **(learning_rates or {})}) if trainable else None
    rules = GroupRules.of(config["optimizer"])
    rules.check(getattr(optimizer, "func", None))
    parts = {
        "net": net,
        "optimizer": optimizer,
        "rules": rules,
        "loss": build_loss(config, facts),
        "metrics": build_metrics(config, facts["num_classes"]),
        "scheduler": build(schedule) if trainable and "_target_" in schedule else None,
        "num_classes": facts["num_classes"],
    }
    return build({"_target_": CLASSIFIER, **config["classifier"]}, parts)


def pays_channels_last(net: nn.Module, stated: bool | str) -> bool:
    """auto: where the net has depthwise convolutions, 1.4 times as fast with it on a CPU (EfficientNet-Lite0, 96 px);
    ResNet-18, AlexNet and ViT lose 5 % there.

    Raises:
        UserError: neither true, false nor auto.
    """
    if stated not in (True, False, "auto"):
        raise UserError(f"trainer.channels_last={stated}: give true, false or auto.")
    if stated != "auto":
        return bool(stated)
    return any(isinstance(layer, nn.Conv2d) and 1 < layer.groups == layer.in_channels for layer in net.modules())


def build_loss(config: Config, facts: DataFacts) -> Any:
    """loss=, whose constructor may ask for num_classes and class_counts (the training images of each class).

    Of another class than the option's, given by `loss._target_=`, the option's keys count where they say something.

    Raises:
        UserError: an option that the class does not have.
    """
    node = dict(config.get("loss") or {})
    if not node:
        return None
    taken, any_name = options_of(resolve_target(node["_target_"], "loss._target_"))
    unset = {key for key, value in UNSET_OF_LOSS.items() if node.get(key) == value and key not in taken}
    node = {key: value for key, value in node.items() if key not in unset or (any_name and value is not None)}
    classes = facts["num_classes"]
    return build(node, {"num_classes": classes, "class_counts": facts.get("class_counts") or [1] * classes})


def prepare_net(module: Any, plan: RunPlan) -> None:
    """For training: BatchNorm over several ranks (trainer.sync_batchnorm), activations that are computed again."""
    if plan.trainer["sync_batchnorm"] and plan.cluster.world_size > 1:
        synchronise(module.net, "cuda" if plan.accelerator == "gpu" else "cpu")
    if plan.trainer.get("activation_checkpointing"):
        recompute_activations(module.net)


def _own_arguments(optimizer: Config) -> Config:
    """Without what train.yaml says for all optimizers; the launch has scaled the learning rates already."""
    of_all = ("scale_lr_with_batch", "base_batch_size", *RULES)
    return {key: value for key, value in optimizer.items() if key not in of_all}


def data_facts(data: Any) -> DataFacts:
    """What a checkpoint says of the data it was trained on, as plain values."""
    return {
        "class_names": list(data.class_names),
        "num_classes": int(data.num_classes),
        "image_size": int(data.image_size),
        "channels": int(data.channels),
        "mean": [float(value) for value in data.mean],
        "std": [float(value) for value in data.std],
        "resize": int(data.framing.resize),
        "fit": str(data.framing.fit),
        "crop_pct": float(data.settings.crop_pct),
        "interpolation": str(data.framing.interpolation),
        "data_hash": str(data.data_hash),
        "class_counts": [int(count) for count in data.class_counts],
    }


def _loggers(plan: RunPlan, known: Known) -> list[Any]:
    """Ours, and Lightning's, in whose words a `run_id` is the name of a run that is there already (MLflow)."""
    folder, step = plan.folder, plan.resume_step
    theirs = {"save_dir": str(folder.path), "id": folder.run_id, "run_name": folder.run_id}
    loggers = []
    for name, node in (plan.config["logger"] or {}).items():
        if not node:
            continue
        if node["_target_"] == TENSORBOARD and step is not None:
            node = {"purge_step": step + 1, **node}  # hides what steps that were lost had written
        try:
            loggers.append(build(node, theirs if node["_target_"].startswith("lightning.") else known))
        except ModuleNotFoundError as error:
            raise UserError(f"logger {name}: {error}") from None
    return loggers


def build_run(plan: RunPlan, session: RankSession, *, trained_on: DataFacts | None = None) -> Run:
    """Data, module and trainer of one rank.

    Args:
        trained_on: for an evaluation, what the checkpoint says of the data that it was trained on.
    """
    trainable = trained_on is None
    config, own, cluster = plan.config, plan.trainer, plan.cluster
    strategy = build_strategy(plan)
    data = build_data(plan, trained_on)
    facts = data_facts(data)
    if trained_on and "class_counts" in trained_on:  # the weights of a weighted loss
        facts["class_counts"] = trained_on["class_counts"]
    module = build_module(
        config, facts, trainable=trainable, has_checkpoint=bool(plan.checkpoint), learning_rates=plan.learning_rates
    )
    session.wait_for_all()
    check_same_data(facts, data, cluster)
    limit, interval, limits = None, 1.0, {} if data.num_val else {"limit_val_batches": 0.0}
    if trainable:
        batches = data.num_train // data.global_batch_size * plan.batch.accumulate
        limit = whole_steps(own["limit_train_batches"], batches, plan.batch.accumulate)
        limits["limit_train_batches"] = limit
        cut = own.get("overfit_batches") or limit
        interval = validation_interval(
            own["val_check_interval"], cut if isinstance(cut, int) else int(cut * batches), plan.batch.accumulate
        )
        limits["val_check_interval"] = interval
        prepare_net(module, plan)
        if own["compile"]:
            module.net.compile()
        if isinstance(module.net, StartsFromImages):
            module.net.init_from_images(data.sample_images(5000))
    if cluster.is_rank_zero:
        data.report, lists = report.report_of(data) if trainable else ({}, {})
        report.log_contents(data, data.report)
        report.log_settings(data, plan.choices.get("augmentation") if trainable else None)
        report.write_lists(plan.folder.path, lists)
    if trainable:
        parts = plan.batch.accumulate * capabilities(strategy).micro_batches
        for sentence in check_batch_norm(
            module.net, images=plan.batch.global_size // (cluster.world_size * parts), world_size=cluster.world_size,
            micro_batches=parts, synchronised=own["sync_batchnorm"],
        ):  # fmt: skip
            if cluster.is_rank_zero:
                log.info(sentence)
    torch.manual_seed(config["seed"] + 7919 * cluster.rank)  # dropout differs between ranks
    known = _known(plan, facts, limit)
    recorder = RunRecorder(plan.folder.record)
    chosen = _chosen_callbacks(plan, known, trainable=trainable)
    callbacks = _all_callbacks(plan, session, chosen, recorder)
    if trainable:
        callbacks[:0] = _of_length(plan, session, recorder, interval)
    loggers = _loggers(plan, known) if trainable else []
    trainer = build_trainer(plan, strategy, callbacks, loggers, plan.folder.path, limits)
    checkpoints = next((c for c in chosen if isinstance(c, Checkpoints)), None)
    return Run(trainer, module, data, facts, recorder, checkpoints)


def _known(plan: RunPlan, facts: DataFacts, limit_train_batches: float | None) -> Known:
    """What a callback or logger gets where its constructor has a parameter of that name."""
    folder, cluster, config = plan.folder, plan.cluster, as_run(plan)
    config["data"].update({key: facts[key] for key in ("mean", "std", "crop_pct", "interpolation")})
    if limit_train_batches is not None:
        config["trainer"]["limit_train_batches"] = limit_train_batches
    return {
        "folder": folder.checkpoints, "run_folder": folder.path, "run_id": folder.run_id,
        "path": folder.metrics, "resume_step": plan.resume_step, "global_batch_size": plan.batch.global_size,
        "node_rank": cluster.node_rank, "local_rank": cluster.local_rank or 0, "cluster": cluster,
        "contents": {"config": config, "data": facts}, "hardware": config.get("hardware"),
    }  # fmt: skip


def _chosen_callbacks(plan: RunPlan, known: Known, *, trainable: bool) -> list[Any]:
    """Those of the config, and the upload's where there is a bucket."""
    chosen = [build(node, known) for node in (plan.config["callbacks"] or {}).values() if node]
    for callback in chosen:
        if not isinstance(callback, pl.Callback):
            raise UserError(f"callbacks: {type(callback).__name__} is no callback of Lightning's.")
        if isinstance(callback, REFUSED_CALLBACKS):
            raise UserError(
                f"callbacks: {type(callback).__name__} cannot be added: checkpoints (callbacks.checkpoints.…) and the "
                "progress line are here already."
            )
    chosen.sort(key=lambda callback: isinstance(callback, Checkpoints))  # last: it saves the states of the others
    if trainable and (plan.config.get("s3") or {}).get("uri"):
        from lockstep.callbacks.s3_upload import S3Upload

        chosen.append(S3Upload(plan.folder.path, **plan.config["s3"]))
    return chosen


def _all_callbacks(plan: RunPlan, session: RankSession, chosen: list[Any], recorder: RunRecorder) -> list[Any]:
    """In the order in which they are called."""
    callbacks: list[Any] = [TrainingLog(plan.batch.global_size), *chosen, session.interruption, recorder]
    if session.hang_dump is not None:
        callbacks.insert(0, session.hang_dump)
    if decay := plan.trainer["ema_decay"]:
        from lockstep.callbacks.weight_average import WeightAverage

        callbacks.insert(0, WeightAverage(decay, device_of(plan)))
    return callbacks


def _of_length(plan: RunPlan, session: RankSession, recorder: RunRecorder, interval: float) -> list[Any]:
    """First of all: others go by what these decide."""
    callbacks: list[Any] = [ValidationInterval(interval)] if isinstance(interval, int) else []
    if stated := plan.trainer["max_time"]:
        seconds = seconds_of(stated, "trainer.max_time")
        callbacks.append(MaxTime(seconds, recorder.elapsed, session.interruption))
    return callbacks
