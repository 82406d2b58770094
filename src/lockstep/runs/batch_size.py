"""Decide the batch of a run from its config and its ranks."""

import logging
from collections.abc import Callable
from typing import Any

from lockstep.config.class_source import defines_in_source
from lockstep.process.errors import UserError
from lockstep.ranks.find import Cluster
from lockstep.records.batch import (
    ACCUMULATION,
    DEFAULT_GLOBAL_BATCH_SIZE,
    Batch,
    states_accumulation,
)
from lockstep.records.config import Config
from lockstep.records.record import RunRecord

log = logging.getLogger(__name__)

Search = Callable[[Config, Cluster, Batch], dict[str, Any]]


def is_lockstep_data(config: Config) -> bool:
    """Return whether data= makes the batches of a rank itself, from data.global_batch_size.

    Lockstep's data modules have the method `attach_to_ranks`. Another class may take the option as
    they do.
    """
    data = config["data"]
    target = str(data.get("_target_"))
    return "global_batch_size" in data or defines_in_source(target, "attach_to_ranks")


def cut_smallest_batch(config: Config, cluster: Cluster) -> Batch:
    """Return the batch in which each micro-batch of a rank has one image.

    With the user's own loaders it has one of their batches.
    """
    accumulate = config["trainer"]["accumulate_grad_batches"]
    return Batch.cut(cluster.world_size * max(accumulate, 1), cluster.world_size, accumulate)


def resolve_batch(config: Config, cluster: Cluster, most_per_device: float | None = None) -> Batch:
    """Return the batch of a run whose earlier starts, if any, are not known.

    For data.global_batch_size=max it is the smallest one, until the largest has been found.

    Args:
        most_per_device: see `cut_images`.
    """
    size = _global_size_or_max(config)
    if size == "max" or not is_lockstep_data(config):
        return cut_smallest_batch(config, cluster)
    return cut_images(config, cluster, size, most_per_device)


def _global_size_or_max(config: Config) -> Any:
    return config["data"].get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)


def cut_images(
    config: Config, cluster: Cluster, global_size: int, most_per_device: float | None
) -> Batch:
    """Return the batch of a step with `global_size` images.

    Args:
        most_per_device: the most images that a device takes at a time, for a resumed run. Unless
            the command line states the accumulation, it follows the number of ranks. None for a
            new run, which accumulates as its options say.
    """
    if most_per_device is None or states_accumulation(config.get("overrides", ())):
        accumulate = config["trainer"]["accumulate_grad_batches"]
        return Batch.cut(global_size, cluster.world_size, accumulate)
    return Batch.cut_to_limit(global_size, cluster.world_size, most_per_device)


def cut_loader_batches(config: Config, cluster: Cluster, earlier_record: RunRecord) -> Batch:
    """Return the batch of a step of the user's own loaders, whose batches count as images.

    A resumed run keeps as many batches a step as before, unless the command line states the
    accumulation.

    Raises:
        UserError: the batches do not divide over the ranks.
    """
    if not earlier_record.world_size or states_accumulation(config["overrides"]):
        return cut_smallest_batch(config, cluster)
    batches = earlier_record.world_size * (earlier_record.accumulate_grad_batches or 1)
    if batches % cluster.world_size:
        raise UserError(
            f"A step of this run has {batches} batches of your own loaders, which do not divide "
            f"over {cluster.world_size} ranks. Resume it on a number of ranks that divides "
            f"{batches}, or give {ACCUMULATION}=NUMBER, the batches of each rank in a step."
        )
    return Batch.cut_to_limit(batches, cluster.world_size, limit=1)


def decide_batch(
    config: Config,
    cluster: Cluster,
    earlier_record: RunRecord,
    earlier_config: Config,
    search: Search,
) -> tuple[Batch, dict[str, Any]]:
    """Return the batch of a start, and the result of a search for the largest one.

    The result is {} if there was no search.

    Args:
        earlier_record: the record that an earlier start has left; a blank one for a new run.
        earlier_config: the config of an earlier start, whose largest batch the run keeps; {} for a
            new run.
        search: looks for the largest batch, given the config, the cluster and the smallest batch.
    """
    if not is_lockstep_data(config):
        return cut_loader_batches(config, cluster, earlier_record), {}

    result: dict[str, Any] = {}
    size = _global_size_or_max(config)
    if size == "max":
        size = (earlier_config.get("data") or {}).get("global_batch_size")
        if not isinstance(size, int):
            log.info("Looking for the largest batch …")
            result = search(config, cluster, cut_smallest_batch(config, cluster))
            size = int(result["global"])
    most_per_device = earlier_record.per_device_batch_limit or earlier_record.per_device_batch_size
    return cut_images(config, cluster, size, most_per_device), result


def refuse_other_epoch(config: Config, earlier_record: RunRecord, batch: Batch) -> None:
    """Refuse limits in micro-batches if a step has another number of them than before.

    An epoch would have more or fewer steps, and the schedule would end at another step.
    """
    earlier = earlier_record.accumulate_grad_batches
    if not earlier or earlier == batch.accumulate:
        return
    for name in ("limit_train_batches", "overfit_batches"):
        limit = config["trainer"].get(name)
        if type(limit) is int and limit > 0:
            raise UserError(
                f"trainer.{name}={limit} counts micro-batches, of which a step had {earlier} and "
                f"would have {batch.accumulate} on these ranks. Resume on as many ranks as before, "
                f"or give {ACCUMULATION}={earlier}."
            )
