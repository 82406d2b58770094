"""Config → Run(trainer, module, data): the only place where the rooms meet."""

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, SimpleProfiler

from lockstep.callbacks import checkpoint_io
from lockstep.callbacks.checkpoint_io import CheckpointFiles
from lockstep.callbacks.checkpoints import Checkpoints
from lockstep.callbacks.interruption import silence_lightning
from lockstep.callbacks.run_recorder import RunRecorder
from lockstep.callbacks.training_log import TrainingLog
from lockstep.config.instantiate import build
from lockstep.distributed.cluster import Cluster, visible_devices
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.strategies.precision import BFloat16Mixed
from lockstep.strategies.sharded_checkpoint import read as read_shards
from lockstep.strategies.sync_batchnorm import batch_norm_warnings, synchronise
from lockstep.training.checks import check_fits, check_same_data, whole_steps
from lockstep.training.rank import StartedRanks, World, device_of

log = logging.getLogger(__name__)

CLASSIFIER = "classifier.ImageClassifier"  # of checkpoints that do not name theirs
TENSORBOARD = "lightning.pytorch.loggers.TensorBoardLogger"
PROFILERS = {"simple": SimpleProfiler, "advanced": AdvancedProfiler}
REFUSED_CALLBACKS = (pl.callbacks.ModelCheckpoint, pl.callbacks.ProgressBar)
PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
OWN_TRAINER_KEYS = ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic")


@dataclass
class Run:
    """Everything that a door needs to fit or test."""

    trainer: pl.Trainer
    module: pl.LightningModule
    data: Any
    recorder: RunRecorder | None = None
    checkpoints: Checkpoints | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def build_data(config: dict[str, Any], cluster: Cluster, device: torch.device) -> Any:
    data = build(config["data"], {"seed": config["seed"]})
    data.prepare()
    data.place(
        rank=cluster.rank,
        world_size=cluster.world_size,
        accumulate_grad_batches=config["trainer"]["accumulate_grad_batches"],
        device=device,
    )
    return data


def build_module(config: dict[str, Any], facts: dict[str, Any], *, trainable: bool = True) -> pl.LightningModule:
    """The classifier for data with these facts (num_classes, image_size, channels).

    The same seed gives every rank the same weights, whatever was drawn before.
    """
    torch.manual_seed(config["seed"])
    shape = {name: facts[name] for name in ("num_classes", "image_size", "channels")}
    own = dict(config["model"])
    if not trainable or config.get("ckpt_path"):  # the checkpoint brings the weights: nothing is fetched
        own.update({key: value for key, value in (("pretrained", False), ("weights", None)) if key in own})
    net = build(own, shape)
    if config["trainer"].get("channels_last"):
        net = net.to(memory_format=torch.channels_last)
    if str(config["trainer"]["precision"]) in ("64-true", "64"):
        net = net.double()  # Lightning restores weights before it converts the module, and would round them
    schedule = config.get("scheduler") or {}
    parts = {
        "net": net,
        "optimizer": build(_without_scaling(config["optimizer"])) if trainable else None,
        "scheduler": build(schedule) if trainable and "_target_" in schedule else None,
        "num_classes": facts["num_classes"],
    }
    return build({"_target_": CLASSIFIER, **config["classifier"]}, parts)


def synchronise_batch_norm(module: Any, config: dict[str, Any], cluster: Cluster) -> None:
    """Where trainer.sync_batchnorm asks for it and there are several ranks."""
    if config["trainer"]["sync_batchnorm"] and cluster.world_size > 1:
        synchronise(module.net, "cuda" if config["trainer"]["accelerator"] == "gpu" else "cpu")


def _without_scaling(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's own arguments; the launch has scaled its learning rates already."""
    return {key: value for key, value in optimizer.items() if key not in ("scale_lr_with_batch", "base_batch_size")}


def load_weights(module: pl.LightningModule, path: str, model_name: str) -> dict[str, Any]:
    """Put a checkpoint's weights into the module, before a strategy takes it.

    Returns:
        What the checkpoint says of the data that it was trained on.
    Raises:
        UserError: the checkpoint is of another model; names the first parameter that differs.
    """
    checkpoint = read_checkpoint(path)
    check_fits(module, checkpoint["state_dict"], path, model_name)
    module.load_state_dict(checkpoint["state_dict"])
    return (checkpoint.get("lockstep") or {}).get("data") or {}


def start_from(module: pl.LightningModule, path: str, model_name: str, data: Mapping[str, Any], data_hash: str) -> str:
    """Put a checkpoint's weights into the module of a new run; where the classes are others, the head stays new.

    A net that has `adapted` takes weights from another image size.

    Args:
        data: the run's data config: the same name under another seed has other validation images.
        data_hash: of the run's images.
    Returns:
        A sentence that says so.
    Raises:
        UserError: the checkpoint is of another model; names the first parameter that differs.
    """
    checkpoint = read_checkpoint(path)
    own, found = module.state_dict(), checkpoint["state_dict"]
    resampled = False
    if hasattr(module.net, "adapted"):
        of_net = {name[4:]: value for name, value in found.items() if name.startswith("net.")}
        others = {name: value for name, value in found.items() if not name.startswith("net.")}
        adapted = module.net.adapted(of_net)
        resampled = adapted is not of_net
        found = {**others, **{f"net.{name}": value for name, value in adapted.items()}}
    facts = (checkpoint.get("lockstep") or {}).get("data") or {}
    there, here = facts.get("num_classes", module.num_classes), module.num_classes
    new = [
        name
        for name, value in found.items()
        if there != here and name in own and own[name].shape[1:] == value.shape[1:]
        and (own[name].shape[:1], value.shape[:1]) == ((here,), (there,))
    ]  # fmt: skip
    found = {**found, **{name: own[name] for name in new}}
    check_fits(module, found, path, model_name)
    module.load_state_dict(found)
    but = f"; of {there} classes there, {here} here: {', '.join(new)} start new" if new else ""
    but += "; position embeddings resampled" if resampled else ""
    before = ((checkpoint.get("lockstep") or {}).get("config") or {}).get("data") or {}
    if before.get("name") == data["name"]:
        if before.get("seed") != data["seed"]:
            why = f"data.seed was {before.get('seed')}, is {data['seed']}"
            but += f". It may have trained on images that validate here: {why}"
        elif facts.get("image_size") == data["image_size"] and facts.get("data_hash") != data_hash:
            but += ". It may have trained on images that validate or test here, which are not those of then"
    return f"Starting from the weights of {path}{but}."


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A file, or a folder of shards, as tensors and plain values in CPU memory."""
    return checkpoint_io.read_checkpoint(path, read_folder=read_shards)


def data_facts(data: Any) -> dict[str, Any]:
    """What a checkpoint says of the data it was trained on, as plain values."""
    return {
        "class_names": list(data.class_names),
        "num_classes": int(data.num_classes),
        "image_size": int(data.image_size),
        "channels": int(data.channels),
        "mean": [float(value) for value in data.mean],
        "std": [float(value) for value in data.std],
        "data_hash": str(data.data_hash),
    }


def precision_of(config: dict[str, Any]) -> str:
    """auto: bf16 where the hardware has it, else fp16 with scaling on a GPU (fp32 in a swarm), fp32 on the CPU.

    Raises:
        UserError: none of those that every strategy knows.
    """
    stated = str(config["trainer"]["precision"])
    stated = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}.get(stated, stated)
    if stated not in PRECISIONS:
        raise UserError(f"trainer.precision={stated}: take one of {', '.join(PRECISIONS)}.")
    if stated != "auto":
        return stated
    if config["trainer"]["accelerator"] != "gpu":
        return "32-true"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "32-true" if "swarm" in config["trainer"] else "16-mixed"  # peers cannot scale their losses together


def build_trainer(
    config: dict[str, Any], cluster: Cluster, callbacks: list[Any], loggers: list[Any], root: Path
) -> pl.Trainer:
    own = config["trainer"]
    if own["log_every_n_steps"] < 1:
        raise UserError(f"trainer.log_every_n_steps={own['log_every_n_steps']}: give a whole number from 1 on.")
    # What Lightning's Trainer does not know is ours or the strategy's.
    known = inspect.signature(pl.Trainer).parameters.keys() - set(OWN_TRAINER_KEYS)
    arguments = {key: value for key, value in own.items() if key in known}
    if name := own.get("profiler"):
        arguments["profiler"] = _profiler(name, root)
    strategy, device_type = _strategy(config, cluster), "cuda" if own["accelerator"] == "gpu" else "cpu"
    plugins: list[Any] = [StartedRanks(cluster), CheckpointFiles(read_folder=read_shards)]
    precision = precision_of(config)
    if hasattr(strategy, "precision_for"):
        plugins.append(strategy.precision_for(precision, device_type))
        precision = None
    elif precision == "bf16-mixed":
        plugins.append(BFloat16Mixed(device_type))
        precision = None
    trainer = pl.Trainer(
        accelerator=own["accelerator"],
        devices=cluster.devices if own["launch"] == "process_per_device" else own["devices"],
        num_nodes=cluster.num_nodes,
        strategy=strategy,
        precision=precision,
        plugins=plugins,
        callbacks=callbacks,
        logger=loggers,
        deterministic=own["accelerator"] == "cpu" if own["deterministic"] == "auto" else own["deterministic"],
        default_root_dir=str(root),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **arguments,
    )
    silence_lightning(trainer)
    return trainer


def _profiler(name: str, root: Path) -> Profiler:
    """Its table goes to the run folder: Lightning would say it in a log that nobody reads."""
    if name not in PROFILERS:
        raise UserError(f"trainer.profiler={name}: take {', '.join(PROFILERS)} or null.")
    return PROFILERS[name](dirpath=root, filename="profile")


def _strategy(config: dict[str, Any], cluster: Cluster) -> Any:
    own = config["trainer"]
    known = {"timeout": timedelta(seconds=own["timeout_s"]), "device": device_of(config, cluster)}
    node = own["strategy"] or ({"_target_": "lockstep.strategies.ddp.DDP"} if cluster.world_size > 1 else None)
    strategy = build(node, known) if node else "auto"
    if own["ema_decay"] and not getattr(strategy, "supports_ema", True):
        raise UserError(
            f"trainer.ema_decay={own['ema_decay']} cannot average weights under {type(strategy).__name__}: "
            "leave it out, or choose trainer=ddp (on CPUs ddp_sim)."
        )
    return strategy


def _loggers(config: dict[str, Any], folder: RunFolder, known: dict[str, Any]) -> list[Any]:
    """Ours, and Lightning's, in whose words a `run_id` is the name of a run that is there already (MLflow)."""
    theirs = {"save_dir": str(folder.path), "id": folder.run_id, "run_name": folder.run_id}
    loggers = []
    for name, node in (config["logger"] or {}).items():
        if not node:
            continue
        if node["_target_"] == TENSORBOARD and known["resume_step"] is not None:
            node = {"purge_step": known["resume_step"] + 1, **node}  # hides what steps that were lost had written
        try:
            loggers.append(build(node, theirs if node["_target_"].startswith("lightning.") else known))
        except ModuleNotFoundError as error:
            raise UserError(f"logger {name}: {error}") from None
    return loggers


def build_run(
    config: dict[str, Any],
    cluster: Cluster,
    folder: RunFolder,
    world: World,
    resume_step: int | None,
    *,
    trainable: bool = True,
) -> Run:
    """Data, module and trainer of one rank.

    Args:
        config: composed, plain, `trainer` resolved for this machine.
        resume_step: the optimizer step that this run goes on from in its folder; None for a new run.
    """
    device = device_of(config, cluster)
    data = build_data(config, cluster, device)
    facts = data_facts(data)
    module = build_module(config, facts, trainable=trainable)
    if world.watch is not None:
        world.watch.wait_for_all("prepared")
    check_same_data(facts, data, cluster)
    own = config["trainer"]
    if trainable:
        accumulate = own["accumulate_grad_batches"]
        batches = data.num_train // data.global_batch_size * accumulate
        own["limit_train_batches"] = whole_steps(own["limit_train_batches"], batches, accumulate)
    if trainable:
        synchronise_batch_norm(module, config, cluster)
    if trainable and own["compile"]:
        if "stage_devices" in own or "num_gpus" in own:
            raise UserError("trainer.compile=true needs one device a process: leave it out, or choose ddp or fsdp.")
        module.net.compile()
    if trainable and hasattr(module.net, "init_from_images"):
        module.net.init_from_images(data.sample_images(5000))
    if cluster.is_rank_zero:
        for sentence in batch_norm_warnings(
            module.net, world_size=cluster.world_size, synchronised=own["sync_batchnorm"],
            micro_batches=own["accumulate_grad_batches"] * (own.get("micro_batches") or 1),
        ):  # fmt: skip
            log.info(sentence)
    torch.manual_seed(config["seed"] + 7919 * cluster.rank)  # dropout differs between ranks
    known = {
        "folder": folder.checkpoints, "run_folder": folder.path, "run_id": folder.run_id,
        "path": folder.metrics, "resume_step": resume_step, "global_batch_size": data.global_batch_size,
        "node_rank": cluster.node_rank, "local_rank": cluster.local_rank or 0, "cluster": cluster,
        "contents": {"config": config, "data": facts},
        "peak_tflops": (config.get("hardware") or {}).get("peak_tflops"),
        "visible_devices": visible_devices(), "hardware": config.get("hardware"),
    }  # fmt: skip
    recorder = RunRecorder(folder.record)
    chosen = [build(node, known) for node in (config["callbacks"] or {}).values() if node]
    for callback in chosen:
        if isinstance(callback, REFUSED_CALLBACKS):
            raise UserError(
                f"callbacks: {type(callback).__name__} cannot be added: checkpoints (callbacks.checkpoints.…) and the "
                "progress line are here already."
            )
    if trainable and (config.get("s3") or {}).get("uri"):
        from lockstep.callbacks.s3_upload import S3Upload

        chosen.append(S3Upload(folder.path, **config["s3"]))
    callbacks = [TrainingLog(data.global_batch_size), *chosen, world.interruption, recorder]
    if world.watch is not None:
        callbacks.insert(0, world.watch)
    if own["ema_decay"]:
        from lockstep.callbacks.weight_average import WeightAverage

        callbacks.insert(0, WeightAverage(own["ema_decay"], device))
    loggers = _loggers(config, folder, known) if trainable else []
    trainer = build_trainer(config, cluster, callbacks, loggers, folder.path)
    checkpoints = next((c for c in chosen if isinstance(c, Checkpoints)), None)
    return Run(trainer, module, data, recorder, checkpoints, facts)
