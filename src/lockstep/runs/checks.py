"""Refuse options that cannot work, before torch is imported."""

import math
import tempfile
from pathlib import Path

from lockstep.config.keys import LARGEST_SEED
from lockstep.config.schema import key_of
from lockstep.process.environment import environment
from lockstep.process.errors import UserError
from lockstep.ranks.find import Cluster, find_requested_run_id
from lockstep.records.config import Config, data_name, model_name, parse_seconds
from lockstep.runs.batch_size import resolve_batch
from lockstep.storage.s3 import Bucket

# Modules of src/data whose data.root must exist, unless it is an address. torchvision creates its
# root by a download, and a class of the user's may create its own.
FOLDER_READERS = (
    "data.image_folder",
    "data.parquet",
    "data.table",
    "data.webdataset",
)
# An override of one of these keys shows that a slow training on a CPU is meant.
CPU_CHOICES = (
    "experiment",
    "debug",
    "data",
    "data._target_",
    "model",
    "trainer",
    "trainer.accelerator",
    "trainer.max_steps",
    "trainer.limit_train_batches",
    "resume",
)
# A socket's path has 107 characters at most; multiprocessing adds a folder and a name.
LONGEST_TMPDIR = 76


def check_before_start(config: Config, cluster: Cluster) -> None:
    """Refuse an option that cannot work, or a path that does not exist.

    Raises:
        UserError: it names the option that is wrong, and what to type.
    """
    # A run that may resume chooses the micro-batches that fit its ranks. A new run has as many as
    # its options say.
    may_resume = config.get("resume") or cluster.launcher == "torchrun"
    resolve_batch(config, cluster, most_per_device=math.inf if may_resume else None)

    if config.get("against"):
        raise UserError(
            f"against={config['against']} compares the arms of a sweep: add -m and seed=1,2,3."
        )
    if config["task_name"] == "train":
        _check_training(config)
        if cluster.accelerator == "cpu":
            _check_training_on_cpu(config)

    if (config.get("s3") or {}).get("uri"):
        Bucket.from_config(config["s3"])
    if config.get("logbook") not in (None, "keep"):
        raise UserError(f"logbook={config['logbook']}: give keep, or leave it out.")

    _check_resume(config)
    _check_root(config, cluster)
    temporary = tempfile.gettempdir()
    if len(temporary) > LONGEST_TMPDIR:
        raise UserError(
            f"TMPDIR={temporary} is too long for the sockets of worker processes: set TMPDIR=/tmp."
        )


def _check_training(config: Config) -> None:
    trainer = config["trainer"]
    if isinstance(trainer["max_epochs"], int) and trainer["max_epochs"] < 1:
        raise UserError(
            f"trainer.max_epochs={trainer['max_epochs']}: give a whole number from 1 on, or null."
        )
    seed = config["seed"]
    if not isinstance(seed, int) or not 0 <= seed <= LARGEST_SEED:
        raise UserError(
            f"seed={'null' if seed is None else seed}: give a whole number from 0 to "
            f"{LARGEST_SEED}, as numpy takes."
        )
    if trainer.get("limit_train_batches") == 0:
        raise UserError(
            "trainer.limit_train_batches=0 leaves nothing to train on: give 1.0 for all batches."
        )
    decay = trainer["ema_decay"]
    is_share = isinstance(decay, int | float) and 0 <= decay < 1
    if decay is not None and not is_share:
        raise UserError(
            f"trainer.ema_decay={decay}: give a number from 0 to below 1, such as 0.999, or null."
        )
    if trainer["max_time"]:
        parse_seconds(trainer["max_time"], "trainer.max_time")


def _check_training_on_cpu(config: Config) -> None:
    """Refuse the default recipe, which takes days without a GPU, unless it is meant."""
    if config["choices"].get("data") == "none":
        return
    if any(key_of(override) in CPU_CHOICES for override in config["overrides"]):
        return
    raise UserError(
        f"This would train {model_name(config)} on {data_name(config)} at "
        f"{config['data'].get('image_size')} pixels, days on a machine without a GPU: make train "
        "(experiment=quickstart) takes a minute, and trainer=cpu begins all the same."
    )


def _check_resume(config: Config) -> None:
    resume = config.get("resume")
    if not resume:
        return
    if resume == "auto":
        if not find_requested_run_id(config, environment()):
            raise UserError(
                "resume=auto needs to know which run: give run_id=… (or RUN_ID), "
                "or resume=<run_id>."
            )
        return
    if config["run_id"] not in (None, Path(resume).name):
        raise UserError(
            f"resume={resume} continues that run under its own id: leave "
            f"run_id={config['run_id']} out, or start a new run from its "
            f"weights with ckpt_path={resume}."
        )


def _check_root(config: Config, cluster: Cluster) -> None:
    # If one of several nodes ended here, the others would wait for it. Their ranks end together
    # later, when one of them finds no images.
    if cluster.num_nodes > 1:
        return
    data = config["data"]
    root = str(data.get("root") or "")
    reader = str(data.get("_target_")).rpartition(".")[0]
    is_local_path = root and "://" not in root
    if is_local_path and reader in FOLDER_READERS and not Path(root).exists():
        raise UserError(
            f"data.root={root} does not exist: give a folder or file of this machine, "
            "or s3://bucket/prefix."
        )
