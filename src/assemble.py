"""Config → Run(trainer, module, data): the only place where the rooms meet, and the only caller of instantiate."""

import contextlib
import functools
import importlib
import inspect
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import ClusterEnvironment

import provenance
from callbacks import checkpoint_io
from callbacks.checkpoint_io import CheckpointFiles
from callbacks.checkpoints import Checkpoints
from callbacks.interruption import Interruption, silence_lightning
from callbacks.run_recorder import RunRecorder
from callbacks.training_log import TrainingLog
from callbacks.watch import SILENT_AFTER_S, Watch, own_connection
from classifier import ImageClassifier
from cluster import Cluster
from errors import UserError
from join import check_all_equal, join, share_checkpoint
from provenance import available_cores
from run_files import RunFolder
from strategies.sharded_checkpoint import read as read_shards
from strategies.sync_batchnorm import batch_norm_warnings, layer_sync

OWN_TRAINER_KEYS = ("accelerator", "devices", "num_nodes", "strategy", "precision", "sync_batchnorm", "deterministic")
ROOMS = ("models", "data", "strategies", "callbacks", "optimizers", "schedulers")
LIBRARIES = (
    "torch.optim", "torch.nn", "lightning.pytorch.callbacks", "lightning.pytorch.loggers",
    "lightning.pytorch.profilers", "lightning.pytorch.strategies",
)  # fmt: skip

EXPECTED_WARNINGS = (
    ".*recommended to use `self.log.*sync_dist=True.*",  # the module reduces its counts before it logs them
    ".*smaller than the logging interval.*",  # every epoch's last step is a log point too
    ".*isinstance\\(treespec, LeafSpec\\).*",  # Lightning 2.6 on torch 2.14
    ".*`broadcast_buffers` is deprecated.*",  # Lightning 2.6 on torch 2.14
    ".*Grad strides do not match bucket view strides.*",  # (n, 1, h, w) weights: both layouts mean the same there
    ".*callbacks used to create the checkpoint need to be provided.*",  # the average of weights, at the test
    ".*Found .* module\\(s\\) in eval mode at the start of training.*",
)


@dataclass
class World:
    """What watches over a run from before its parts are built: hosts, signals, and with several ranks heartbeats."""

    hosts: list[dict[str, Any]]
    interruption: Interruption = field(default_factory=Interruption)
    watch: Watch | None = None


@dataclass
class Run:
    """Everything that a door needs to fit or test."""

    trainer: pl.Trainer
    module: ImageClassifier
    data: Any
    recorder: RunRecorder | None = None
    checkpoints: Checkpoints | None = None
    facts: dict[str, Any] = field(default_factory=dict)


class StartedRanks(ClusterEnvironment):
    """Tells Lightning what the Cluster knows, so that it neither launches nor detects anything by itself."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.cluster = cluster

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.cluster.master_addr

    @property
    def main_port(self) -> int:
        return self.cluster.master_port or 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.cluster.world_size

    def set_world_size(self, size: int) -> None:
        assert size == self.cluster.world_size, (size, self.cluster)

    def global_rank(self) -> int:
        return self.cluster.rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.cluster.rank, (rank, self.cluster)

    def local_rank(self) -> int:
        return self.cluster.local_rank or 0

    def node_rank(self) -> int:
        return self.cluster.node_rank


def check_targets(config: Any, where: str = "config") -> None:
    """Refuse any `_target_` outside our rooms and the libraries above, looked up to the object it really names.

    Raises:
        UserError: names the key and the target.
    """
    if isinstance(config, dict):
        if "_target_" in config:
            resolve_target(config["_target_"], f"{where}._target_")
        for key, value in config.items():
            check_targets(value, f"{where}.{key}")
    elif isinstance(config, list):
        for index, value in enumerate(config):
            check_targets(value, f"{where}[{index}]")


def resolve_target(target: Any, where: str) -> Any:
    """The class or function that a `_target_` names."""
    refused = UserError(
        f"{where}={target!r} is not allowed: a config builds only classes of {', '.join(ROOMS)} "
        f"and of {', '.join(LIBRARIES)}."
    )
    if not isinstance(target, str) or not _inside(target):
        raise refused
    module_name, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{where}={target!r} cannot be found: {error}.") from None
    if not (inspect.isclass(found) or inspect.isfunction(found)) or not _inside(f"{found.__module__}.x"):
        raise refused
    return found


def _inside(dotted: str) -> bool:
    return any(dotted.startswith(f"{home}.") for home in ROOMS + LIBRARIES)


def build(node: Any, known: dict[str, Any] | None = None) -> Any:
    """What a config node describes: `_target_` called with the other keys, or a partial of it with `_partial_`.

    This is hydra.utils.instantiate cut down to plain values: nothing but `_target_` chooses code, and what the run
    knows is handed over as it is, never searched for more nodes.

    Args:
        known: what the run knows (folder, run_id, …): passed where the constructor has a parameter of that name.
    Raises:
        UserError: an option that the target does not have.
    """
    if isinstance(node, list):
        return [build(value) for value in node]
    if not isinstance(node, dict):
        return node
    if "_target_" not in node:
        return {key: build(value) for key, value in node.items()}
    target = resolve_target(node["_target_"], "_target_")
    parameters = inspect.signature(target).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    stated = {key: build(value) for key, value in node.items() if key not in ("_target_", "_partial_")}
    if "name" not in parameters and not any_name:
        stated.pop("name", None)  # the display name of a model
    given = {key: value for key, value in (known or {}).items() if key in parameters and key not in stated}
    unknown = stated.keys() - parameters.keys()
    if unknown and not any_name:
        raise UserError(f"{node['_target_']} has no option {sorted(unknown)[0]!r}; it has {', '.join(parameters)}.")
    if node.get("_partial_"):
        return functools.partial(target, **stated)
    return target(**stated, **given)


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


def build_module(config: dict[str, Any], facts: dict[str, Any], *, trainable: bool = True) -> ImageClassifier:
    """The classifier for data with these facts (num_classes, image_size, channels).

    The same seed gives every rank the same weights, whatever was drawn before.
    """
    torch.manual_seed(config["seed"])
    shape = {name: facts[name] for name in ("num_classes", "image_size", "channels")}
    own = {key: value for key, value in config["model"].items() if key != "name"}  # a display name, not timm's
    net = build(own, shape)
    if config["trainer"].get("channels_last"):
        net = net.to(memory_format=torch.channels_last)
    if config["trainer"]["precision"] == "64-true":
        net = net.double()  # Lightning restores weights before it converts the module, and would round them
    schedule = config.get("scheduler") or {}
    return ImageClassifier(
        net,
        build(config["optimizer"]) if trainable else None,
        build(schedule) if trainable and "_target_" in schedule else None,
        num_classes=facts["num_classes"],
        **config["classifier"],
    )


def load_weights(module: ImageClassifier, path: str, model_name: str) -> None:
    """Put a checkpoint's weights into the module, before a strategy takes it.

    Raises:
        UserError: the checkpoint is of another model; names the first parameter that differs.
    """
    found = read_checkpoint(path)["state_dict"]
    check_fits(module, found, path, model_name)
    module.load_state_dict(found)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A file, or a folder of shards, as tensors and plain values in CPU memory."""
    return checkpoint_io.read_checkpoint(path, read_folder=read_shards)


def check_fits(module: ImageClassifier, found: dict[str, torch.Tensor], path: str, model_name: str) -> None:
    """Compare keys and shapes before anything is loaded."""
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        here, there = (tuple(state[name].shape) if name in state else "missing" for state in (wanted, found))
        if here != there:
            raise UserError(
                f"The checkpoint {path} is of another model than model={model_name}: {name} is {there} there, {here} here."
            )


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


def device_of(config: dict[str, Any], cluster: Cluster) -> torch.device:
    if config["trainer"]["accelerator"] == "gpu":
        return torch.device("cuda", cluster.local_rank or 0)
    return torch.device("cpu")


def precision_of(config: dict[str, Any]) -> str:
    """auto: bf16 where the hardware has it, else fp16 with scaling on a GPU, fp32 on the CPU."""
    stated = config["trainer"]["precision"]
    if stated != "auto":
        return stated
    if config["trainer"]["accelerator"] != "gpu":
        return "32-true"
    return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"


def build_trainer(
    config: dict[str, Any], cluster: Cluster, callbacks: list[Any], loggers: list[Any], root: Path
) -> pl.Trainer:
    own = config["trainer"]
    # What Lightning's Trainer does not know is ours or the strategy's.
    known = inspect.signature(pl.Trainer).parameters.keys() - set(OWN_TRAINER_KEYS)
    arguments = {key: value for key, value in own.items() if key in known}
    strategy = _strategy(config, cluster)
    plugins: list[Any] = [StartedRanks(cluster), CheckpointFiles(read_folder=read_shards)]
    if own["sync_batchnorm"] and cluster.world_size > 1:
        plugins.append(layer_sync("cuda" if own["accelerator"] == "gpu" else "cpu"))
    precision = precision_of(config)
    if hasattr(strategy, "precision_for"):
        plugins.append(strategy.precision_for(precision, "cuda" if own["accelerator"] == "gpu" else "cpu"))
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


def _strategy(config: dict[str, Any], cluster: Cluster) -> Any:
    own = config["trainer"]
    known = {"timeout": timedelta(seconds=own["timeout_s"]), "device": device_of(config, cluster)}
    node = own["strategy"] or ({"_target_": "strategies.ddp.DDP"} if cluster.world_size > 1 else None)
    strategy = build(node, known) if node else "auto"
    if own["ema_decay"] and not getattr(strategy, "supports_ema", True):
        raise UserError(
            f"trainer.ema_decay={own['ema_decay']} cannot average weights under {type(strategy).__name__}: "
            "leave it out, or choose trainer=ddp (on CPUs ddp_sim)."
        )
    return strategy


@contextlib.contextmanager
def enter_world(config: dict[str, Any], cluster: Cluster, folder: RunFolder) -> Iterator[World]:
    """Meet the other ranks, watch over each other until the block ends, and leave together.

    An exception that leaves the block carries `culprit`: which rank failed first, on which host, in which phase.
    """
    check_targets(config)
    _prepare_process(config, cluster)
    if cluster.world_size == 1:
        yield World([provenance.host(cluster.node_rank)])
        return
    timeout_s = config["trainer"]["timeout_s"]
    join(cluster, device_of(config, cluster), timeout_s)
    world = World([], Interruption(), Watch(folder.path, timeout_s))
    connection = own_connection(cluster.master_addr, cluster.master_port, SILENT_AFTER_S)
    world.watch.begin(connection, cluster.rank, cluster.world_size, world.interruption)
    try:
        everyone = check_all_equal(config, cluster)
        world.hosts = [dict(list(host.items())[3:]) for host in everyone[:: cluster.devices]]
        share_checkpoint(config, cluster, folder)
        yield world
        torch.distributed.barrier()
    except BaseException as error:
        if not hasattr(error, "culprit"):
            error.culprit = world.watch.explain(error)
        raise
    finally:
        world.watch.end()
    torch.distributed.destroy_process_group()


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
    if trainable and hasattr(module.net, "init_from_images"):
        module.net.init_from_images(data.sample_images(5000))
    if cluster.is_rank_zero:
        trainer_config = config["trainer"]
        for sentence in batch_norm_warnings(
            module.net, world_size=cluster.world_size, synchronised=trainer_config["sync_batchnorm"],
            micro_batches=trainer_config["accumulate_grad_batches"] * (trainer_config.get("micro_batches") or 1),
        ):  # fmt: skip
            print(sentence, flush=True)
    torch.manual_seed(config["seed"] + 7919 * cluster.rank)  # dropout differs between ranks
    known = {
        "folder": folder.checkpoints, "run_folder": folder.path, "run_id": folder.run_id,
        "path": folder.metrics, "resume_step": resume_step, "global_batch_size": data.global_batch_size,
        "node_rank": cluster.node_rank, "local_rank": cluster.local_rank or 0, "cluster": cluster,
        "contents": {"config": config, "data": facts},
    }  # fmt: skip
    recorder = RunRecorder(folder.record, data.global_batch_size)
    chosen = [build(node, known) for node in (config["callbacks"] or {}).values() if node]
    if trainable and (config.get("s3") or {}).get("uri"):
        from callbacks.s3_upload import S3Upload

        chosen.append(S3Upload(folder.path, **config["s3"]))
    callbacks = [TrainingLog(data.global_batch_size), *chosen, world.interruption, recorder]
    if world.watch is not None:
        callbacks.insert(0, world.watch)
    if config["trainer"]["ema_decay"]:
        from lightning.pytorch.callbacks import EMAWeightAveraging

        callbacks.insert(0, EMAWeightAveraging(decay=config["trainer"]["ema_decay"]))
    loggers = []
    if trainable:
        known["folder"] = folder.tensorboard
        loggers = [build(node, known) for node in (config["logger"] or {}).values() if node]
    trainer = build_trainer(config, cluster, callbacks, loggers, folder.path)
    checkpoints = next((c for c in chosen if isinstance(c, Checkpoints)), None)
    return Run(trainer, module, data, recorder, checkpoints, facts)


def _prepare_process(config: dict[str, Any], cluster: Cluster) -> None:
    threads = config["trainer"]["num_threads"]
    if threads == "auto":
        threads = max(1, available_cores() // cluster.devices)
    torch.set_num_threads(threads)
    torch.manual_seed(config["seed"])
    if config["trainer"]["accelerator"] == "gpu":
        torch.set_float32_matmul_precision("high")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message)
