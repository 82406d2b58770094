"""The plan of a run: the user's config, which is read-only, and everything that was decided from it."""

import copy
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.class_source import has_method
from lockstep.config.keys import is_rate
from lockstep.config.schema import key_of
from lockstep.process.environment import environment, visible_gpus
from lockstep.process.errors import UserError
from lockstep.ranks.find import Cluster, describe, named_run
from lockstep.ranks.placement import place
from lockstep.records.batch import DEFAULT_EVAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_SIZE, Batch, states_accumulation
from lockstep.records.config import Config, data_name, model_name, seconds_of
from lockstep.records.folder import RunFolder
from lockstep.storage.s3 import Bucket

# Modules of src/data whose root is there or is an address; a class of the user's own may make its root
READERS = ("data.image_folder", "data.table", "data.torchvision_sets", "data.webdataset")
# An override of one of these keys makes a training on a CPU a choice
CHOSEN = ("experiment", "debug", "data", "data._target_", "model", "trainer", "trainer.accelerator",
          "trainer.max_steps", "trainer.limit_train_batches", "resume")  # fmt: skip
MOST_OF_TMPDIR = 76  # a socket's path has 107 characters at most; multiprocessing adds a folder and a name


@dataclass(frozen=True)
class RunPlan:
    """The facts that every rank of a run knows before it builds its parts.

    Args:
        config: composed, as the user asked for it, with `choices` (the option of each group) and `overrides`.
        accelerator: cpu or gpu.
        resume_step: optimizer steps that a resumed run has done; None for a new run.
        checkpoint: on the machine of rank 0; the run's own after a resume_step above 0, else one with initial weights.
    """

    config: Config
    cluster: Cluster
    accelerator: str
    folder: RunFolder
    batch: Batch
    resume_step: int | None = None
    checkpoint: str | None = None

    @property
    def trainer(self) -> Config:
        """The config's options of the trainer."""
        return self.config["trainer"]

    @property
    def choices(self) -> Config:
        """The option of each config group."""
        return self.config["choices"]

    @property
    def learning_rates(self) -> dict[str, float]:
        """Each learning rate × global batch / base_batch_size (Goyal et al. 2017); {} unless scale_lr_with_batch."""
        optimizer = self.config["optimizer"]
        if self.config["task_name"] != "train" or not optimizer.get("scale_lr_with_batch"):
            return {}
        base = optimizer["base_batch_size"]
        if not isinstance(base, int) or base < 1:
            raise UserError(f"optimizer.base_batch_size={base!r}: give a whole number from 1 on.")
        names = [key for key in optimizer if is_rate(key)]
        return {name: optimizer[name] * self.batch.global_size / base for name in names}


def resolve_cluster(config: Config, trainer_name: str, environ: Mapping[str, str]) -> tuple[Cluster, str]:
    """Return the Cluster, and cpu or gpu; a UserError says what works here if machine and options do not fit."""
    gpus = visible_gpus(environ)
    is_training = config["task_name"] == "train"
    accelerator, wanted = place(config["trainer"], trainer_name, gpus, is_training)
    cluster = describe(environ, wanted)
    if wanted.several_processes and accelerator == "gpu" and cluster.devices > gpus:
        raise UserError(
            f"{cluster.devices} ranks on this node see {gpus} GPU{'s' if gpus != 1 else ''}: each rank must see "
            "all of its node's (SLURM: --gpus-per-node, not --gpus-per-task), and there must be one for each."
        )
    return cluster, accelerator


def is_lockstep_data(config: Config) -> bool:
    """Return whether data= makes the batches of a rank itself, from data.global_batch_size.

    Lockstep's data modules have the method `place`; another class may take the option as they do.
    """
    data = config["data"]
    return "global_batch_size" in data or has_method(str(data.get("_target_")), "place")


def resolve_batch(config: Config, cluster: Cluster, limit: float | None = None, size: int | None = None) -> Batch:
    """Return how the global batch is split; for data.global_batch_size=max the smallest, until the largest is found.

    Args:
        limit: for a resumed run, the images that a device takes at a time: accumulation follows the number of ranks
            where the command line does not state it.
        size: the largest global batch, once it is found.
    """
    accumulate = config["trainer"]["accumulate_grad_batches"]
    if not is_lockstep_data(config):  # whose loaders decide the images: what counts here is their batches
        size = size or cluster.world_size * max(accumulate, 1)
        limit = None if limit is None else 1
    size = size or config["data"].get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)
    if size == "max":
        return Batch.cut(cluster.world_size * accumulate, cluster.world_size, accumulate)
    if limit is None or states_accumulation(config.get("overrides", ())):
        return Batch.cut(size, cluster.world_size, accumulate)
    return Batch.within(size, cluster.world_size, limit)


def check(config: Config, cluster: Cluster, accelerator: str) -> None:
    """Refuse, before torch is imported, an option that cannot work or a place that is not there."""
    may_resume = config.get("resume") or cluster.launcher == "torchrun"
    resolve_batch(config, cluster, limit=math.inf if may_resume else None)
    data, trainer = config["data"], config["trainer"]
    if config["task_name"] == "train":
        if isinstance(trainer["max_epochs"], int) and trainer["max_epochs"] < 1:
            raise UserError(f"trainer.max_epochs={trainer['max_epochs']}: give a whole number from 1 on, or null.")
        if not 0 <= config["seed"] < 2**32:
            raise UserError(f"seed={config['seed']}: give a whole number from 0 to 4294967295, as numpy takes.")
        if trainer.get("limit_train_batches") == 0:
            raise UserError("trainer.limit_train_batches=0 leaves nothing to train on: give 1.0 for all batches.")
        check_decay(trainer["ema_decay"])
        if trainer["max_time"]:
            seconds_of(trainer["max_time"], "trainer.max_time")
        if accelerator == "cpu" and not any(key_of(word) in CHOSEN for word in config["overrides"]):
            raise UserError(
                f"This would train {model_name(config)} on {data_name(config)} at {data.get('image_size')} pixels, "
                "days on a machine without a GPU: make train (experiment=quickstart) takes a minute, and trainer=cpu "
                "begins all the same."
            )
    if (config.get("s3") or {}).get("uri"):
        Bucket.of(config["s3"])
    if config.get("logbook") not in (None, "keep"):
        raise UserError(f"logbook={config['logbook']}: keep, or nothing.")
    resume = config.get("resume")
    if resume == "auto" and not named_run(config, environment()):
        raise UserError("resume=auto needs to know which run: give run_id=… (or RUN_ID), or resume=<run_id>.")
    if resume and resume != "auto" and config["run_id"] not in (None, Path(resume).name):
        raise UserError(
            f"resume={resume} continues that run under its own id: leave run_id={config['run_id']} out, or start a new "
            f"run from its weights with ckpt_path={resume}."
        )
    root, reader = str(data.get("root") or ""), str(data.get("_target_")).rpartition(".")[0]
    # On several nodes the others would wait: all ranks end together where one finds no images
    if cluster.num_nodes == 1 and root and "://" not in root and reader in READERS and not Path(root).exists():
        raise UserError(
            f"data.root={root} does not exist: give a folder or file of this machine, or s3://bucket/prefix."
        )
    if len(temporary := tempfile.gettempdir()) > MOST_OF_TMPDIR:
        raise UserError(f"TMPDIR={temporary} is too long for the sockets of worker processes: set TMPDIR=/tmp.")


def check_decay(decay: Any) -> None:
    """Refuse a trainer.ema_decay that is no share of an average."""
    is_share = isinstance(decay, int | float) and 0 <= decay < 1
    if decay is not None and not is_share:
        raise UserError(
            f"trainer.ema_decay={decay}: give a number from 0 to below 1, such as 0.999, or null."
        )


def resolved(config: Config, cluster: Cluster, accelerator: str) -> dict[str, Any]:
    """Return a copy of the config with the values that `auto` stands for."""
    own = copy.deepcopy(dict(config))
    own["trainer"].update(accelerator=accelerator, devices=cluster.devices, num_nodes=cluster.num_nodes)
    return own


def as_run(plan: RunPlan) -> dict[str, Any]:
    """Return the config with the values that the run has: what config.yaml and checkpoints hold."""
    own = resolved(plan.config, plan.cluster, plan.accelerator)
    if "global_batch_size" in own["data"]:
        own["data"]["global_batch_size"] = plan.batch.global_size
    own["optimizer"].update(plan.learning_rates)
    return own


def headlines(plan: RunPlan) -> list[str]:
    """Return the first line of a run's output, and one on scaled learning rates."""
    parts = [f"run {plan.folder.run_id}", net_name(plan.config), data_name(plan.config)]
    parts.append(trainer_name(plan))
    if plan.config["task_name"] == "train":
        parts += training_parts(plan)
    elif is_lockstep_data(plan.config):
        size = plan.config["data"].get("eval_batch_size", DEFAULT_EVAL_BATCH_SIZE)
        parts.append(f"batches of {size}")
    return [" · ".join(parts), *scaled_rates_line(plan)]


def net_name(config: Config) -> str:
    """Return the name of model=, or of a LightningModule that may build its own net."""
    task = str(config["task"].get("_target_"))
    if task.startswith("tasks."):
        return model_name(config)
    return task.rpartition(".")[2]


def trainer_name(plan: RunPlan) -> str:
    name = plan.choices["trainer"]
    if name == "default":
        return f"default ({plan.accelerator})"
    return name


def training_parts(plan: RunPlan) -> list[str]:
    """Return how the batch is split, and how exact a resume is."""
    parts = []
    is_lockstep = is_lockstep_data(plan.config)
    if is_lockstep:
        batch = plan.batch
        split = f"{batch.per_device} × {plan.cluster.world_size} × {batch.accumulate}"
        parts.append(f"global batch {batch.global_size} = {split}")

    if not (plan.config.get("callbacks") or {}).get("checkpoints"):
        parts.append("WITHOUT CHECKPOINTS")
    elif not plan.trainer.get("resumes_exactly", True):
        # The peers of a swarm draw batches by time.
        pass
    elif is_lockstep:
        parts.append("resume exact in mid-epoch")
    else:
        # The loaders are not built yet. Checkpoints says what holds where they are no plain ones.
        parts.append("resume exact, in mid-epoch by reading the epoch's batches again")
    return parts


def scaled_rates_line(plan: RunPlan) -> list[str]:
    """Return a line on learning rates that follow the batch, or nothing."""
    rates = plan.learning_rates
    if not rates:
        return []
    optimizer = plan.config["optimizer"]
    changes = ", ".join(f"{name} {optimizer[name]:g} → {rate:g}" for name, rate in rates.items())
    base = optimizer["base_batch_size"]
    size = plan.batch.global_size
    return [f"optimizer: {changes} (global batch {size} / base_batch_size {base})"]
