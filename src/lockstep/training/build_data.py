"""Build the data module of a run, and collect the facts about the data that a checkpoint stores."""

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only

from lockstep.config.instantiate import build, options_of, resolve_target
from lockstep.config.keys import names_images
from lockstep.config.locate import foreign_import
from lockstep.config.schema import key_of
from lockstep.data import report
from lockstep.process.errors import UserError
from lockstep.ranks.collectives import gather_objects
from lockstep.ranks.find import Cluster
from lockstep.records import provenance
from lockstep.records.config import Config
from lockstep.runs.join import device_of
from lockstep.runs.run import Run
from lockstep.storage.s3 import is_s3
from lockstep.storage.sync import sync
from lockstep.training.data_report import DataReport

log = logging.getLogger(__name__)

DataFacts = dict[str, Any]  # what a checkpoint says of the data that it was trained on, see data_facts

FACTS_OF_ANY = ("num_classes", "class_names", "image_size", "channels")  # attributes of any data module
OF_ALL = ("fold", "num_folds", "views")  # in the config of any data set, which need not have them
RETIRED = (  # options of older versions
    "verify", "max_pixels", "memory_limit_gib", "device_cache_gib", "cache_gib", "skip_corrupt", "stratify",
    "download_dir", "train", "val", "test", "split_column", "ratio", "interpolation", "switch_prob",
)  # fmt: skip


def build_data(run: Run, trained_on: DataFacts | None = None) -> Any:
    """Return the data module of one rank: Lockstep's, prepared and placed, or any of Lightning's.

    With data=none there is no data module.

    Args:
        trained_on: for an evaluation, the checkpoint's facts about its training data.

    Raises:
        UserError: it is not a LightningDataModule, its images are not here, or ranks have other
            images.
    """
    config = run.config
    cluster = run.cluster
    if run.choices.get("data") == "none":
        return None
    options = {**config["data"], "global_batch_size": run.batch.global_size}
    if not hasattr(resolve_target(options.get("_target_"), "data._target_"), "place"):
        return build_plain_data(config["data"])

    data = prepared_data(config, options, "fit" if trained_on is None else "test")
    if trained_on:
        _match_training(data, trained_on, run)
    data.place(
        rank=cluster.rank,
        world_size=cluster.world_size,
        accumulate_grad_batches=run.batch.accumulate,
        device=device_of(run),
    )

    # From here on the ranks meet in collectives, whose time is limited.
    run.wait_for_all()
    check_same_data(data_facts(data), data, cluster)
    if cluster.is_rank_zero:
        _report(data, run, is_training=trained_on is None)
    return data


def _match_training(data: Any, trained_on: DataFacts, run: Run) -> None:
    """Give evaluated data the classes of the training, and say where the images are others."""
    # Data modules of the user's own may state no classes.
    data.match_classes(trained_on.get("class_names", data.class_names))
    typed = {key_of(override) for override in run.config["overrides"]}
    is_new = any(names_images(key) for key in typed)
    is_same = is_same_data(data, trained_on)
    if is_new:
        if data.splits.drew_test and not is_same and "data.test_fraction" not in typed:
            data.test_on_all()
    elif is_same is False and run.cluster.is_rank_zero:
        log.warning(
            "The images have changed since the training, which may have seen some of these test "
            "images."
        )


def is_same_data(data: Any, trained_on: DataFacts) -> bool | None:
    """Return whether a checkpoint was trained on these data; None where it cannot be told.

    Version 2.0.0 hashed images in another way; of its data only names and sizes are compared.
    """
    if trained_on.get("hash_method") == getattr(data, "hash_method", None):
        return trained_on.get("data_hash") == data.data_hash
    return True if data.list_hash == trained_on.get("list_hash") else None


def _report(data: Any, run: Run, *, is_training: bool) -> None:
    """Log the contents of the data on rank 0, and compare the images of a training."""
    augmentation = run.choices.get("augmentation") if is_training else None
    report.log_contents(data, {}, augmentation)
    if is_training:
        run.data_report = DataReport(data, run.folder)
        run.data_report.start()
    else:
        data.report = {}


def build_plain_data(node: Config) -> pl.LightningDataModule:
    """Return a data module of Lightning's own kind, which has no rank to be placed on."""
    data = build({key: value for key, value in node.items() if not (key in OF_ALL and value is None)})
    if not isinstance(data, pl.LightningDataModule):
        problem = f"data._target_={node['_target_']} is not a LightningDataModule."
        raise UserError(foreign_import(type(data)) or problem)
    return data


def prepared_data(config: Config, stated: Config, stage: str = "fit") -> Any:
    """Return the data module of a config, prepared but not placed on a rank.

    Args:
        stated: its options.
        stage: fit, or test for an evaluation.
    """
    options = of_this_version(stated, "data")
    copies = copy_from_s3(options, config["s3"])
    try:
        data = build(options, {"seed": config["seed"]})
        data.stage = stage
        model = resolve_target(config["model"]["_target_"], "model._target_")
        own = {key: value for key, value in config["model"].items() if key != "_target_"}
        task = config["task"]
        takes_model = "net" in options_of(resolve_target(task["_target_"], "task._target_"))[0] and "net" not in task
        wanted = model.wanted_images(**own) if takes_model and hasattr(model, "wanted_images") else {}
        data.use(build(of_this_version(config["augmentation"], "augmentation")), wanted)
        data.prepare()
    except UserError as error:
        sentence = str(error)
        for copy, address in copies.items():  # the bucket is what the user can correct, and not its copy here
            sentence = sentence.replace(copy, address)
        raise UserError(sentence) from None
    return data


def of_this_version(node: Config, group: str) -> Config:
    """Return a config without the options that its class lacks: of older versions, or null."""
    known, _ = options_of(resolve_target(node.get("_target_"), f"{group}._target_"))
    gone = [f"{group}.{key}={value}" for key, value in node.items() if key in RETIRED and key not in known and value]
    if gone and rank_zero_only.rank == 0:
        log.info(f"Options of an older version, which nothing uses any more: {', '.join(gone)}")
    return {
        key: value for key, value in node.items()
        if not (value is None and key in OF_ALL) and (key in known or key not in RETIRED)
    }  # fmt: skip


def copy_from_s3(options: Config, s3: Config) -> dict[str, str]:
    """Replace s3:// addresses among the options by paths on this node; return the address of each copy."""
    copies, cache = {}, Path(options.get("cache_dir") or "data/cache")
    for key in ("root", "images"):
        if is_s3(address := str(options.get(key) or "").rstrip("/")):
            folder, _, name = address.rpartition("/")
            if beside := name.lower().endswith((".csv", ".tsv", ".txt")) and not options.get("images"):
                address = folder
            copy = sync(address, cache, s3)
            copies[str(copy)], options[key] = address, str(copy / name if beside else copy)
    return copies


def data_facts(data: Any) -> DataFacts:
    """Return the facts about the training data that a checkpoint stores, as plain values."""
    if not hasattr(data, "place"):
        return {key: getattr(data, key) for key in FACTS_OF_ANY if hasattr(data, key)}
    own = ("mean", "std", "data_hash", "list_hash", "class_counts")
    facts = {key: getattr(data, key) for key in (*FACTS_OF_ANY, *own)}
    facts["hash_method"] = getattr(data, "hash_method", None)
    framing = {key: getattr(data.framing, key) for key in ("resize", "fit", "interpolation")}
    names, crop_pct = [str(name) for name in data.class_names], float(data.settings.crop_pct)
    return {**facts, **framing, "class_names": names, "crop_pct": crop_pct, "target": data.target_kind}


def check_same_data(facts: DataFacts, data: Any, cluster: Cluster) -> None:
    """Raise UserError on every rank that names the first with other images, as all draw positions of one list."""
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
