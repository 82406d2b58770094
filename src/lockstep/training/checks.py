"""Check data, model and checkpoint against each other before training; each error says what to change."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from lockstep.callbacks.checkpoint_io import gather_objects
from lockstep.launch.launchers import Cluster
from lockstep.runs import provenance
from lockstep.runs.errors import UserError
from lockstep.runs.folder import RunFolder

# class_names, num_classes, image_size, channels, mean, std, crop_pct, resize, fit, interpolation, data_hash,
# class_counts
DataFacts = dict[str, Any]


def check_fits(module: torch.nn.Module, found: dict[str, torch.Tensor], path: str, model_name: str) -> None:
    """Compare keys and shapes before anything is loaded."""
    wanted = module.state_dict()
    for name in sorted(wanted.keys() | found.keys()):
        here, there = (tuple(state[name].shape) if name in state else "missing" for state in (wanted, found))
        if here != there:
            raise UserError(
                f"The checkpoint {path} is of another model than model={model_name}: "
                f"{name} is {there} there, {here} here."
            )


def check_same_data(facts: DataFacts, data: Any, cluster: Cluster) -> None:
    """All ranks draw positions of one list of images.

    Raises:
        UserError: on every rank, naming the first that has other images (a file damaged or missing on its node).
    """
    if cluster.world_size == 1:
        return
    mine = (facts["data_hash"], data.num_train, data.num_val, data.num_test)
    everyone = gather_objects([provenance.host(0)["host"], *mine])
    for rank, (host, data_hash, *counts) in enumerate(everyone):
        if [data_hash, *counts] != everyone[0][1:]:
            raise UserError(
                f"rank {rank} on {host} has other images than rank 0 on {everyone[0][0]}: {counts[0]} training, "
                f"{counts[1]} validation, {counts[2]} test, hash {data_hash[:12]}, instead of {everyone[0][2]}, "
                f"{everyone[0][3]}, {everyone[0][4]}, {everyone[0][1][:12]}: make data.root equal on all nodes."
            )


def check_data_of_run(checkpoint: Mapping[str, Any], facts: DataFacts, folder: RunFolder) -> None:
    """A run goes on with the images that it began with.

    Raises:
        UserError: they are others now.
    """
    there = {**facts, **checkpoint.get("lockstep", {}).get("data", {})}
    if there.get("class_names") != facts.get("class_names"):
        raise UserError(
            f"The run {folder.run_id} was trained with the classes {', '.join(there['class_names'][:10])}, and now "
            f"they are {', '.join(facts['class_names'][:10])}: start a new run with ckpt_path=."
        )
    before = there["data_hash"]
    if before != facts["data_hash"]:
        raise UserError(
            f"The run {folder.run_id} was trained on other images (hash {before[:12]}, now {facts['data_hash'][:12]}): "
            "give it the same data.root, or start a new run with ckpt_path=."
        )


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
