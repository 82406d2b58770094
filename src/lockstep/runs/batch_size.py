"""Decide the batch of a run from its config and its ranks."""

import logging
from collections.abc import Callable
from typing import Any

from lockstep.config.class_source import has_method
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

    Lockstep's data modules have the method `attach_to_ranks`; another class may take the option as
    they do.
    """
    data = config["data"]
    return "global_batch_size" in data or has_method(str(data.get("_target_")), "attach_to_ranks")


def resolve_batch(
    config: Config, cluster: Cluster, limit: float | None = None, size: int | None = None
) -> Batch:
    """Return how the global batch is split.

    For data.global_batch_size=max it is the smallest one, until the largest has been found.

    Args:
        limit: for a resumed run, the images that a device takes at a time: accumulation follows the
            number of ranks where the command line does not state it.
        size: the largest global batch, once it is found.
    """
    accumulate = config["trainer"]["accumulate_grad_batches"]
    if not is_lockstep_data(config):
        # The user's loaders decide the images: what counts is their batches, one for each rank and
        # micro-batch.
        size = size or cluster.world_size * max(accumulate, 1)
        _refuse_other_loaders(size, cluster.world_size)
        limit = None if limit is None else 1

    size_or_max: Any = size or config["data"].get("global_batch_size", DEFAULT_GLOBAL_BATCH_SIZE)
    if size_or_max == "max":
        return Batch.cut(cluster.world_size * accumulate, cluster.world_size, accumulate)
    if limit is None or states_accumulation(config.get("overrides", ())):
        return Batch.cut(size_or_max, cluster.world_size, accumulate)
    return Batch.cut_to_limit(size_or_max, cluster.world_size, limit)


def _refuse_other_loaders(batches: int, world_size: int) -> None:
    """
    Raises:
        UserError: the batches of a step of the user's own loaders do not divide over the ranks.
    """
    if batches % world_size:
        raise UserError(
            f"A step of this run has {batches} batches of your own loaders, which do not divide "
            f"over {world_size} ranks. Resume it on a number of ranks that divides {batches}, or "
            f"give {ACCUMULATION}=NUMBER, the batches of each rank in a step."
        )


def decide_batch(
    config: Config, cluster: Cluster, record: RunRecord, earlier_config: Config, search: Search
) -> tuple[Batch, dict[str, Any]]:
    """Return the batch of a start, and the result of a search for the largest one.

    The result is {} where there was no search.

    Args:
        record: that an earlier start has left; a blank one for a new run.
        earlier_config: of an earlier start, whose largest batch the run keeps; {} for a new run.
        search: looks for the largest batch, given the config, the cluster and the smallest batch.
    """
    limit = record.per_device_batch_limit or record.per_device_batch_size
    size = None
    if not is_lockstep_data(config) and not states_accumulation(config["overrides"]):
        # Batches of the user's own loaders are counted, and a step keeps as many as before.
        size = (record.world_size or 0) * (record.accumulate_grad_batches or 1) or None
    batch = resolve_batch(config, cluster, limit, size)
    if config["data"].get("global_batch_size") != "max":
        return batch, {}

    largest = (earlier_config.get("data") or {}).get("global_batch_size")
    result: dict[str, Any] = {}
    if not isinstance(largest, int):
        log.info("Looking for the largest batch …")
        result = search(config, cluster, batch)
        largest = int(result["global"])
    return resolve_batch(config, cluster, limit, largest), result


def refuse_other_epoch(config: Config, previous: RunRecord, batch: Batch) -> None:
    """Refuse limits in micro-batches if a step has another number of them than before.

    An epoch would have more or fewer steps, and the schedule would end elsewhere.
    """
    earlier = previous.accumulate_grad_batches
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
