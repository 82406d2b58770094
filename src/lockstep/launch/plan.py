"""The plan of a run: the user's config, which nobody changes, and everything that was decided from it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.launchers import Cluster, describe
from lockstep.runs.batch import DEFAULT_EVAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_SIZE, Batch, states_accumulation
from lockstep.runs.config import Config, data_name, model_name, seconds_of
from lockstep.runs.environment import visible_gpus
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.runs.output import duration
from lockstep.strategies.placement import place

CHECKPOINTS = "lockstep.callbacks.checkpoints.Checkpoints"


@dataclass(frozen=True)
class RunPlan:
    """The facts that every rank of a run knows before it builds its parts.

    Args:
        config: composed, as the user asked for it; read-only.
        choices: the option of each config group.
        overrides: those of the command line.
        accelerator: cpu or gpu.
        learning_rates: by the optimizer's option, where they differ from the config's.
        resume_step: optimizer steps that a resumed run has done; None for a new run.
        resume_checkpoint: the run's own checkpoint on the machine of rank 0; None if no whole one was left.
        initial_weights: the checkpoint that a new run takes its weights from.
    """

    config: Config
    choices: Config
    overrides: tuple[str, ...]
    cluster: Cluster
    accelerator: str
    folder: RunFolder
    batch: Batch
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    resume_step: int | None = None
    resume_checkpoint: str | None = None
    initial_weights: str | None = None

    @property
    def trainer(self) -> Config:
        """The config's options of the trainer."""
        options: Config = self.config["trainer"]
        return options

    @property
    def model_name(self) -> str:
        """The model as records and pages name it."""
        return model_name({"model": self.config["model"], "choices": self.choices})

    @property
    def data_name(self) -> str:
        return data_name({"data": self.config["data"], "choices": self.choices})

    @property
    def checkpoint(self) -> str | None:
        """The run's own checkpoint, else the one that it begins with."""
        return self.resume_checkpoint or self.initial_weights


def new_plan(config: Config, cluster: Cluster, accelerator: str, folder: RunFolder, batch: Batch) -> RunPlan:
    """Return the plan of a new run.

    Args:
        config: with `choices` and `overrides`.
    """
    own = {key: value for key, value in config.items() if key not in ("choices", "overrides")}
    rates = scaled_learning_rates(config["optimizer"], batch) if config["task_name"] == "train" else {}
    return RunPlan(own, config["choices"], tuple(config["overrides"]), cluster, accelerator, folder, batch, rates)


def resolve_cluster(config: Config, trainer_name: str, environ: Mapping[str, str]) -> tuple[Cluster, str]:
    """Return the Cluster, and cpu or gpu.

    Raises:
        UserError: the machine, the launcher and the options do not fit; says what works here.
    """
    gpus = visible_gpus(environ)
    accelerator, wanted = place(config["trainer"], trainer_name, gpus)
    cluster = describe(environ, wanted)
    if wanted.several_processes and accelerator == "gpu" and cluster.devices > gpus:
        raise UserError(
            f"{cluster.devices} ranks on this node see {gpus} GPU{'s' if gpus != 1 else ''}: each rank must see "
            "all of its node's (SLURM: --gpus-per-node, not --gpus-per-task), and there must be one for each."
        )
    return cluster, accelerator


def resolve_batch(config: Config, cluster: Cluster, limit: float | None = None, size: int | None = None) -> Batch:
    """Return how the global batch is split; for data.global_batch_size=max the smallest, until the largest is found.

    Args:
        config: with `overrides`.
        limit: for a resumed run, the images that a device takes at a time: accumulation follows the number of ranks
            where the command line does not state it.
        size: the largest global batch, once it is found.

    Raises:
        UserError: it does not divide.
    """
    accumulate = config["trainer"]["accumulate_grad_batches"]
    size = size or config["data"].get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)
    if size == "max":
        return Batch.of_device(1, cluster.world_size, accumulate)
    if limit is None or states_accumulation(config.get("overrides", ())):
        return Batch.cut(size, cluster.world_size, accumulate)
    return Batch.within(size, cluster.world_size, limit)


def validates(config: Config) -> bool:
    """Return False for data.val_fraction=0, data.num_val=0 or trainer.limit_val_batches=0."""
    data = config["data"]
    stated = data.get("val_fraction", 0.1) if data.get("num_val") is None else data["num_val"]
    return stated != 0 and config["trainer"].get("limit_val_batches", 1.0) != 0


def scaled_learning_rates(optimizer: Config, batch: Batch) -> dict[str, float]:
    """Return each learning rate × global batch / base_batch_size (Goyal et al. 2017); {} unless scale_lr_with_batch."""
    if not optimizer.get("scale_lr_with_batch"):
        return {}
    base = optimizer["base_batch_size"]
    if not isinstance(base, int) or base < 1:
        raise UserError(f"optimizer.base_batch_size={base!r}: give a whole number from 1 on.")
    names = [key for key in optimizer if key == "lr" or key.endswith("_lr")]
    return {name: optimizer[name] * batch.global_size / base for name in names}


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
    return {**own, "choices": dict(plan.choices), "overrides": list(plan.overrides)}


def headlines(plan: RunPlan) -> list[str]:
    """Return the first line of a run's output, and one on scaled learning rates."""
    batch, data, optimizer, trainer = plan.batch, plan.config["data"], plan.config["optimizer"], plan.choices["trainer"]
    where = f"{trainer} ({plan.accelerator})" if trainer == "default" else trainer
    task = str(plan.config["task"].get("_target_"))
    model = plan.model_name if task.startswith("tasks.") else task.rpartition(".")[2]  # which may build its own net
    parts = [f"run {plan.folder.run_id}", model, plan.data_name, where]
    if plan.config["task_name"] != "train":
        return [" · ".join([*parts, f"batches of {data.get('eval_batch_size', DEFAULT_EVAL_BATCH_SIZE)}"])]
    if "global_batch_size" in data or str(data.get("_target_")).startswith("data."):
        split = f"{batch.per_device} × {plan.cluster.world_size} × {batch.accumulate}"
        parts.append(f"global batch {batch.global_size} = {split}")
    if stated := plan.trainer.get("max_time"):
        parts.append(f"at most {duration(seconds_of(stated, 'trainer.max_time'))}")
    callbacks = (plan.config.get("callbacks") or {}).values()
    if not any(node and node.get("_target_") == CHECKPOINTS for node in callbacks):
        parts.append("WITHOUT CHECKPOINTS")
    elif not validates(plan.config):
        parts.append("no validation: the last checkpoint counts as the best")
    lines, base = [" · ".join(parts)], optimizer.get("base_batch_size")
    if plan.learning_rates:
        changes = ", ".join(f"{name} {optimizer[name]:g} → {rate:g}" for name, rate in plan.learning_rates.items())
        lines.append(f"optimizer: {changes} (global batch {batch.global_size} / base_batch_size {base})")
    return lines
