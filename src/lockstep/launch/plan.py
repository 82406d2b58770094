"""The plan of a run: the user's config, which nobody changes, and everything that was decided from it."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.launch.checks import CHECKPOINTS, validates
from lockstep.launch.launchers import Cluster, describe
from lockstep.runs.batch import DEFAULT_EVAL_BATCH_SIZE, DEFAULT_GLOBAL_BATCH_SIZE, Batch, states_accumulation
from lockstep.runs.config import Config, data_name, model_name
from lockstep.runs.durations import in_words, seconds_of
from lockstep.runs.environment import visible_gpus
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder
from lockstep.strategies.placement import place


@dataclass(frozen=True)
class ResumePoint:
    """Where a run that goes on continues.

    Args:
        step: optimizer steps done; 0 where no whole checkpoint was left.
        checkpoint: a file on the machine of rank 0; None at step 0.
    """

    step: int
    checkpoint: str | None = None


@dataclass(frozen=True)
class RunPlan:
    """
    Args:
        config: composed, as the user asked for it; read-only.
        choices: the option of each config group.
        overrides: the words of the command line.
        accelerator: cpu or gpu.
        learning_rates: by the optimizer's option, where they are others than the config's.
        resume: None for a new run.
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
    resume: ResumePoint | None = None
    initial_weights: str | None = None

    @property
    def trainer(self) -> Config:
        """The config's options of the trainer."""
        options: Config = self.config["trainer"]
        return options

    @property
    def model_name(self) -> str:
        """What is built, in the words of records and pages."""
        return model_name({"model": self.config["model"], "choices": self.choices})

    @property
    def data_name(self) -> str:
        return data_name({"data": self.config["data"], "choices": self.choices})

    @property
    def resume_step(self) -> int | None:
        """None for a new run."""
        return self.resume.step if self.resume else None

    @property
    def checkpoint(self) -> str | None:
        """What the weights come from: the run's own checkpoint, else the one that it begins with."""
        return self.resume.checkpoint if self.resume and self.resume.checkpoint else self.initial_weights


def resolve_cluster(config: Config, trainer_name: str, environ: Mapping[str, str]) -> tuple[Cluster, str]:
    """The Cluster, and cpu or gpu.

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
    """For data.global_batch_size=max the smallest there is, until the largest is found.

    Args:
        config: with `overrides`.
        limit: of a run that goes on, images that a device takes at a time: accumulation follows the number of ranks
            where the command line does not state it.
        size: the largest global batch, once it is found.
    Raises:
        UserError: it does not divide.
    """
    accumulate = config["trainer"]["accumulate_grad_batches"]
    if size is None and asks_for_largest(config):
        return Batch.of_device(1, cluster.world_size, accumulate)
    size = size or config["data"].get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)
    if limit is None or states_accumulation(config.get("overrides", ())):
        return Batch.cut(size, cluster.world_size, accumulate)
    return Batch.within(size, cluster.world_size, limit)


def asks_for_largest(config: Config) -> bool:
    return bool(config["data"].get("global_batch_size") == "max")


def scaled_learning_rates(optimizer: Config, batch: Batch) -> dict[str, float]:
    """For optimizer.scale_lr_with_batch=true: lr × global batch / base_batch_size (Goyal et al. 2017), by option."""
    if not optimizer.get("scale_lr_with_batch"):
        return {}
    base = optimizer["base_batch_size"]
    if not isinstance(base, int) or base < 1:
        raise UserError(f"optimizer.base_batch_size={base!r}: give a whole number from 1 on.")
    names = [key for key in optimizer if key == "lr" or key.endswith("_lr")]
    return {name: optimizer[name] * batch.global_size / base for name in names}


def resolved(config: Config, cluster: Cluster, accelerator: str) -> dict[str, Any]:
    """A copy of the config with what `auto` came to."""
    own = copy.deepcopy(dict(config))
    own["trainer"].update(accelerator=accelerator, devices=cluster.devices, num_nodes=cluster.num_nodes)
    return own


def as_run(plan: RunPlan) -> dict[str, Any]:
    """The config with the values that the run has: what config.yaml and checkpoints carry, and what all ranks share."""
    own = resolved(plan.config, plan.cluster, plan.accelerator)
    if "global_batch_size" in own["data"]:
        own["data"]["global_batch_size"] = plan.batch.global_size
    own["optimizer"].update(plan.learning_rates)
    return {**own, "choices": dict(plan.choices), "overrides": list(plan.overrides)}


def headline(plan: RunPlan) -> str:
    batch, trainer = plan.batch, plan.choices["trainer"]
    where = f"{trainer} ({plan.accelerator})" if trainer == "default" else trainer
    images = f"global batch {batch.global_size} = {batch.per_device} × {plan.cluster.world_size} × {batch.accumulate}"
    if plan.config["task_name"] != "train":
        images = f"batches of {plan.config['data'].get('eval_batch_size', DEFAULT_EVAL_BATCH_SIZE)}"
    return (
        f"run {plan.folder.run_id} · {plan.model_name} · {plan.data_name} · {where} · {images}"
        f"{time_limit(plan.config)}{chosen_how(plan.config)}"
    )


def time_limit(config: Config) -> str:
    stated = config["trainer"].get("max_time") if config["task_name"] == "train" else None
    return f" · at most {in_words(seconds_of(stated, 'trainer.max_time'))}" if stated else ""


def chosen_how(config: Config) -> str:
    """Said at the end of the head line of a training that leaves nothing to resume or to test, or validates nothing."""
    callbacks = (config.get("callbacks") or {}).values()
    kept = any(node and node.get("_target_") == CHECKPOINTS for node in callbacks)
    if config["task_name"] != "train":
        return ""
    if not kept:
        return " · WITHOUT CHECKPOINTS"
    return "" if validates(config) else " · no validation: the last checkpoint counts as the best"


def learning_rate_line(plan: RunPlan) -> str:
    """From what to what learning rates were scaled."""
    own, batch = plan.config["optimizer"], plan.batch.global_size
    changes = ", ".join(f"{name} {own[name]:g} → {value:g}" for name, value in plan.learning_rates.items())
    return f"optimizer: {changes} (global batch {batch} / base_batch_size {own['base_batch_size']})"
