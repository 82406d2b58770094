"""Build the data module of a run, and say what a checkpoint keeps of the data."""

import logging
from typing import Any

import lightning.pytorch as pl

from lockstep.config.instantiate import build, options_of, resolve_target
from lockstep.config.schema import key_of
from lockstep.launch.plan import RunPlan
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.training.checks import DataFacts
from lockstep.training.local_root import on_this_node, said_by_address
from lockstep.training.rank import device_of

log = logging.getLogger(__name__)

FACTS_OF_ANY = ("num_classes", "class_names", "image_size", "channels")  # attributes of any data module
NEW_DATA = {"data", "data.root", "data.images"}  # overrides that name other images
OF_ALL = ("fold", "num_folds", "stratify")  # in the config of any data set, which need not have them
RETIRED = ("verify", "max_pixels", "memory_limit_gib", "device_cache_gib", "cache_gib")  # options of version 1


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


def has_plain_data(config: Config) -> bool:
    """Return whether the data module is one of Lightning's own kind: it has no rank to be placed on."""
    return not hasattr(resolve_target(config["data"]["_target_"], "data._target_"), "place")


def build_plain_data(config: Config) -> pl.LightningDataModule:
    """Return a data module of Lightning's own kind.

    Raises:
        UserError: it is no LightningDataModule.
    """
    node = {key: value for key, value in config["data"].items() if not (key in OF_ALL and value is None)}
    data = build(node)
    if not isinstance(data, pl.LightningDataModule):
        raise UserError(f"data._target_={node['_target_']} is no LightningDataModule.")
    return data


def prepared_data(config: Config, stated: Config, stage: str = "fit") -> Any:
    """Return the data module of a config, prepared but not placed on a rank.

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
        model = resolve_target(config["model"]["_target_"], "model._target_")
        own = {key: value for key, value in config["model"].items() if key != "_target_"}
        wanted = model.wanted_images(**own) if hasattr(model, "wanted_images") else {}
        data.use(build(config["augmentation"]), wanted)
        data.prepare()
    return data


def data_facts(data: Any) -> DataFacts:
    """Return what a checkpoint says of the data that it was trained on, as plain values."""
    if not hasattr(data, "place"):
        return {key: getattr(data, key) for key in FACTS_OF_ANY if hasattr(data, key)}
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
