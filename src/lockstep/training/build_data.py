"""Build the data module of a run, and collect the facts that a checkpoint stores about it."""

import logging
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np

from lockstep.config.instantiate import build, parameters_of, resolve_target
from lockstep.config.keys import chooses_images
from lockstep.config.locate import describe_foreign_import
from lockstep.config.schema import key_of
from lockstep.data import report
from lockstep.data.framing import resolve_resize
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

# Facts about the data that a checkpoint was trained on, see data_facts.
DataFacts = dict[str, Any]

# The facts are attributes of Lockstep's data modules, and some of their framing.
GENERAL_FACTS = ("num_classes", "class_names", "image_size", "channels")
IMAGE_FACTS = ("mean", "std", "data_hash", "list_hash", "class_counts")
FRAMING_FACTS = ("resize", "fit", "interpolation")
# A checkpoint stores these options of the data as they were resolved.
IMAGE_SETTINGS = ("mean", "std", "crop_pct", "interpolation")
# The config of every data set has these options. Its class need not take those that are null.
NULLABLE_OPTIONS = ("fold", "num_folds", "inputs", "sampling", "epoch_size", "views")


def build_data(run: Run, checkpoint_facts: DataFacts, *, is_training: bool) -> Any:
    """Return the data module of one rank.

    One of Lockstep's is prepared and attached to the ranks, and any other one is just built. With
    data=none there is none.

    Args:
        checkpoint_facts: the facts in the checkpoint that a training starts or resumes from, or
            that is evaluated; {} without one.

    Raises:
        UserError: it is not a LightningDataModule, its images do not exist, or ranks have
            different images.
    """
    config = run.config
    cluster = run.cluster
    if run.choices.get("data") == "none":
        _refuse_data_options(config["data"])
        _refuse_augmentation(config, "data=none")
        return None
    options = {**config["data"], "global_batch_size": run.batch.global_size}
    target = options.get("_target_")
    if not hasattr(resolve_target(target, "data._target_"), "attach_to_ranks"):
        _refuse_augmentation(config, f"data._target_={target}")
        return build_user_data(config["data"])

    stage = "fit" if is_training else "test"
    data = build_prepared_data(config, options, stage, checkpoint_facts)
    if checkpoint_facts and not is_training:
        _apply_training_facts(data, checkpoint_facts, run)
    data.attach_to_ranks(
        rank=cluster.rank,
        world_size=cluster.world_size,
        accumulate_grad_batches=run.batch.accumulate,
        device=device_of(run),
    )

    # From here on the ranks meet in collectives, whose time is limited.
    run.wait_for_all()
    check_same_data_on_ranks(data_facts(data), data, cluster)
    return data


def _refuse_data_options(node: Config) -> None:
    """Refuse options that a module with its own loaders does not read."""
    for key in NULLABLE_OPTIONS:
        if node.get(key) is not None:
            raise UserError(
                f"data.{key}={node[key]} is an option of Lockstep's data modules, and this module "
                "has its own loaders. Leave it out, and do the same in its train_dataloader."
            )


def _refuse_augmentation(config: Config, data_option: str) -> None:
    """Refuse a typed augmentation= beside a data module of the user's, which does its own."""
    for override in config.get("overrides") or ():
        is_none = override.endswith("augmentation=none")
        if key_of(override).partition(".")[0] == "augmentation" and not is_none:
            raise UserError(
                f"augmentation= belongs to Lockstep's data modules, and {data_option} makes "
                f"batches of its own: remove {override}, or augment there."
            )


def _apply_training_facts(data: Any, training_facts: DataFacts, run: Run) -> None:
    """Give the data of an evaluation the classes and inputs of the training.

    If the command line names other images, all of them are tested. Otherwise a warning is logged
    if the images have changed.
    """
    # The checkpoint of a data module of the user's may have no names of classes.
    data.match_classes(training_facts.get("class_names", data.class_names))
    if training_facts.get("inputs"):
        data.inputs = training_facts["inputs"]
    override_keys = {key_of(override) for override in run.config["overrides"]}
    has_other_images = any(chooses_images(key) for key in override_keys)
    is_same = is_same_data(data, training_facts)
    if has_other_images:
        if data.splits.drew_test and not is_same and "data.test_fraction" not in override_keys:
            data.test_on_all()
    elif is_same is False and run.cluster.is_rank_zero:
        log.warning(
            "The images have changed since the training, which may have seen some of these test "
            "images."
        )


def is_same_data(data: Any, training_facts: DataFacts) -> bool | None:
    """Return whether a checkpoint was trained on these data; None where it cannot be told.

    Version 2.0.0 hashed images in another way. For its checkpoints only the names and sizes of the
    files are compared.
    """
    if training_facts.get("hash_method") == getattr(data, "hash_method", None):
        return training_facts.get("data_hash") == data.data_hash
    return True if data.list_hash == training_facts.get("list_hash") else None


def start_data_report(data: Any, run: Run, *, is_training: bool) -> DataReport | None:
    """Log the contents of Lockstep's data on rank 0, and begin to compare the images of a training.

    Returns:
        The callback that compares them; None where nothing is compared.
    """
    if not hasattr(data, "attach_to_ranks") or not run.cluster.is_rank_zero:
        return None
    augmentation = run.choices.get("augmentation") if is_training else None
    report.log_contents(data, augmentation)
    if not is_training:
        return None
    _warn_of_double_correction(run.config)
    comparison = DataReport(data, run.folder)
    comparison.start()
    return comparison


def _warn_of_double_correction(config: Config) -> None:
    weights = (config.get("loss") or {}).get("class_weights")
    sampling = config["data"].get("sampling")
    if weights is not None and sampling is not None:
        log.warning(
            f"data.sampling={sampling} and loss.class_weights={weights} both correct for classes "
            "of unequal size, so rare classes count twice. Leave one of them out."
        )


def build_user_data(node: Config) -> pl.LightningDataModule:
    """Return a data module that is not Lockstep's, and is not attached to the ranks."""
    data = build(drop_unset_options(node))
    if not isinstance(data, pl.LightningDataModule):
        problem = f"data._target_={node['_target_']} is not a LightningDataModule."
        raise UserError(describe_foreign_import(type(data)) or problem)
    return data


def drop_unset_options(node: Config) -> Config:
    """Return the options of data= without those of NULLABLE_OPTIONS that are null."""
    unset = [key for key in NULLABLE_OPTIONS if node.get(key) is None]
    return {key: value for key, value in node.items() if key not in unset}


def build_prepared_data(
    config: Config,
    data_config: Config,
    stage: str = "fit",
    checkpoint_facts: DataFacts | None = None,
) -> Any:
    """Return the data module of a config, prepared but not attached to the ranks.

    Args:
        data_config: the options of the data module.
        stage: fit, or test for an evaluation.
        checkpoint_facts: the facts in a checkpoint. Its weights know images with its mean and
            deviation, whatever model= says, and numbers of data.inputs with theirs.
    """
    options = drop_unset_options(data_config)
    options, address_of_copy = copy_from_s3(options, config["s3"])
    try:
        data = build(options, {"seed": config["seed"]})
        data.stage = stage
        settings = _image_settings_of_model(config) | _image_settings_of(checkpoint_facts or {})
        data.set_augmentation(build(config["augmentation"]), settings)
        data.prepare()
        scales = (checkpoint_facts or {}).get("inputs")
        if isinstance(scales, Mapping) and scales.keys() == data.inputs.keys():
            data.inputs = {name: scales[name] for name in data.inputs}
    except UserError as error:
        sentence = str(error)
        # The error names the bucket, which the user can correct, and not its copy on this node.
        for copy, address in address_of_copy.items():
            sentence = sentence.replace(copy, address)
        raise UserError(sentence) from None
    return data


def _image_settings_of_model(config: Config) -> Config:
    """Return the image settings of the weights of model=; {} if the task does not take model=."""
    task = config["task"]
    parameters, _ = parameters_of(resolve_target(task["_target_"], "task._target_"))
    options = dict(config["model"])
    model = resolve_target(options.pop("_target_"), "model._target_")
    # A model that was written for version 2.1 or before defines wanted_images.
    image_settings = getattr(model, "wanted_images", getattr(model, "image_settings", None))
    if "net" not in parameters or "net" in task or image_settings is None:
        return {}
    return image_settings(**options)


def _image_settings_of(facts: DataFacts) -> Config:
    """Return the image settings that the weights of a checkpoint were trained with.

    It is {} for deep images and for many channels, whose values belong to their own files.
    """
    if facts.get("range") is not None or facts.get("channels") not in (1, 3):
        return {}
    settings = {name: facts[name] for name in IMAGE_SETTINGS if name in facts}
    if "crop_pct" in settings:
        settings["crop_pct"] = _trained_crop_pct(facts)
    return settings


def _trained_crop_pct(facts: DataFacts) -> float:
    """Return the share of the resized side that the net saw, which data.resize= may have changed.

    Checkpoints of version 2.1 and before have the share without data.resize=.
    """
    size = facts["image_size"]
    if resolve_resize(size, None, facts["crop_pct"]) == facts["resize"]:
        return float(facts["crop_pct"])
    return float(size / facts["resize"])


def copy_from_s3(options: Config, s3: Config) -> tuple[Config, dict[str, str]]:
    """Copy what the options root and images name by s3:// to this node.

    Returns:
        The options with paths on this node, and the address of each copy.
    """
    options = dict(options)
    address_of_copy = {}
    cache = Path(options.get("cache_dir") or "data/cache")
    for key in ("root", "images"):
        address = str(options.get(key) or "").rstrip("/")
        if not is_s3(address):
            continue
        folder, _, name = address.rpartition("/")
        is_list = name.lower().endswith((".csv", ".tsv", ".txt"))
        if is_list and not options.get("images"):
            # The images lie beside their list.
            copy = sync(folder, cache, s3)
            address_of_copy[str(copy)] = folder
            options[key] = str(copy / name)
        else:
            copy = sync(address, cache, s3)
            address_of_copy[str(copy)] = address
            options[key] = str(copy)
    return options, address_of_copy


def data_facts(data: Any) -> DataFacts:
    """Return the facts about the training data that a checkpoint stores, as plain values."""
    if not hasattr(data, "attach_to_ranks"):
        values = {name: _convert_fact(data, name) for name in FACT_CONVERTERS}
        return {name: value for name, value in values.items() if value is not None}
    facts = {key: getattr(data, key) for key in (*GENERAL_FACTS, *IMAGE_FACTS)}
    facts |= {key: getattr(data.framing, key) for key in FRAMING_FACTS}
    reading = getattr(data.source, "reading", None)
    if reading is not None:
        facts |= reading.facts
    facts |= data.target_scale
    if data.inputs:
        facts["inputs"] = data.inputs
    facts["hash_method"] = getattr(data, "hash_method", None)
    facts["class_names"] = [str(name) for name in data.class_names]
    facts["crop_pct"] = _trained_crop_pct({**facts, "crop_pct": data.normalisation.crop_pct})
    facts["target"] = data.target_kind
    return facts


def _convert_fact(data: Any, name: str) -> Any:
    """Return an attribute of the user's data module as a plain value, which a checkpoint can hold.

    It is None if the attribute is missing, has another type, or is not known yet.
    """
    # A property may need setup(), and raise anything before.
    try:
        value = getattr(data, name, None)
        return None if value is None else FACT_CONVERTERS[name](value)
    except Exception:
        return None


def _to_texts(names: Any) -> list[str]:
    if isinstance(names, str | dict):
        raise TypeError("not a list of names")
    return [str(name) for name in names]


def _to_counts(counts: Any) -> list[int]:
    return [int(count) for count in counts]


# The attributes of a user's data module that become facts, and what converts them.
FACT_CONVERTERS: dict[str, Callable[[Any], Any]] = {
    "num_classes": operator.index,
    "class_names": _to_texts,
    "image_size": operator.index,
    "channels": operator.index,
    "class_counts": _to_counts,
    "target_mean": float,
    "target_std": float,
    "inputs": list,
}


def describe_pixel_change(before: DataFacts, now: DataFacts) -> str:
    """Return how equal files become other pixels, as "range None, now [0, 4095]", or "".

    A package that reads images in full depth, such as tifffile, may be on one machine alone.
    """
    if "range" in before and "range" in now and before["range"] != now["range"]:
        return f"range {before['range']}, now {now['range']}"
    for name in ("mean", "std"):
        old = before.get(name)
        new = now.get(name)
        if not old or not new:
            continue
        # The last digits of sums differ between processors.
        if len(old) != len(new) or not np.allclose(old, new, rtol=1e-4, atol=1e-6):
            return f"{name} {old}, now {new}"
    return ""


class RankImages(NamedTuple):
    """The images of one rank, and the node that it is on.

    Attributes:
        counts: the numbers of training, validation and test images.
        pixels: facts that decide which pixels the files become.
    """

    host: str
    data_hash: str
    counts: tuple[int, int, int]
    pixels: DataFacts


def check_same_data_on_ranks(facts: DataFacts, data: Any, cluster: Cluster) -> None:
    """Refuse ranks with different images, because all of them draw positions in one list.

    Raises:
        UserError: on every rank; it names the first rank whose images differ from rank 0's.
    """
    if cluster.world_size == 1:
        return
    images_of_rank = RankImages(
        host=provenance.describe_host(0)["host"],
        data_hash=facts["data_hash"],
        counts=(data.num_train, data.num_val, data.num_test),
        pixels={name: facts[name] for name in ("range", "mean", "std") if name in facts},
    )
    images_of_ranks = gather_objects(images_of_rank)
    for rank, images in enumerate(images_of_ranks):
        _check_same_images(rank, images, images_of_ranks[0])


def _check_same_images(rank: int, images: RankImages, rank_0_images: RankImages) -> None:
    """Refuse a rank whose images differ from those of rank 0, the first."""
    if (images.data_hash, images.counts) != (rank_0_images.data_hash, rank_0_images.counts):
        num_train, num_val, num_test = images.counts
        raise UserError(
            f"rank {rank} on {images.host} has other images than rank 0 on {rank_0_images.host}: "
            f"{num_train} training, {num_val} validation, {num_test} test, hash "
            f"{images.data_hash[:12]}, instead of {', '.join(map(str, rank_0_images.counts))}, "
            f"{rank_0_images.data_hash[:12]}: make data.root equal on all nodes."
        )
    change = describe_pixel_change(rank_0_images.pixels, images.pixels)
    if change:
        raise UserError(
            f"rank {rank} on {images.host} reads the same files as other pixels than rank 0 on "
            f"{rank_0_images.host} ({change}): install the same packages on all nodes, such as "
            "tifffile and pydicom."
        )
