"""Early refusals, before torch is imported: options that cannot work, and places that are not there."""

import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lockstep.config.schema import key_of
from lockstep.launch.launchers import Cluster, fault, named_run
from lockstep.launch.plan import resolve_batch
from lockstep.runs.config import Config, seconds_of
from lockstep.runs.errors import UserError
from lockstep.storage.s3 import Bucket

log = logging.getLogger(__name__)

# Modules of src/data whose root is there or is an address; a class of the user's own may make its root
READERS = ("data.cifar10", "data.image_folder", "data.mnist", "data.table", "data.webdataset")
CHOSEN = ("experiment", "debug", "data", "data._target_", "model", "trainer", "trainer.accelerator",
          "trainer.max_steps", "trainer.limit_train_batches", "resume")  # fmt: skip
MOST_OF_TMPDIR = 76  # a socket's path has 107 characters at most; multiprocessing adds a folder and a name


def check(config: Config, cluster: Cluster, accelerator: str, environ: Mapping[str, str]) -> None:
    """Refuse, by a UserError, an option that cannot work or a place that is not there."""
    may_resume = config.get("resume") or cluster.launcher == "torchrun"
    resolve_batch(config, cluster, limit=math.inf if may_resume else None)
    if config["task_name"] == "train":
        check_training(config, accelerator)
    if (config.get("s3") or {}).get("uri"):
        Bucket.of(config["s3"])
    if config.get("logbook") not in (None, "keep"):
        raise UserError(f"logbook={config['logbook']}: keep, or nothing.")
    if config.get("resume") == "auto" and not named_run(config, environ):
        raise UserError("resume=auto needs to know which run: give run_id=… (or RUN_ID), or resume=<run_id>.")
    if cluster.num_nodes == 1:  # else the others would wait: all ranks end together where one finds no images
        check_root(config)
    if len(temporary := tempfile.gettempdir()) > MOST_OF_TMPDIR:
        raise UserError(f"TMPDIR={temporary} is too long for the sockets of worker processes: set TMPDIR=/tmp.")
    if not cluster.local_rank and (sentence := fault(cluster)):
        log.warning(sentence)


def check_training(config: Config, accelerator: str) -> None:
    """Refuse a length that cannot be, and on a machine without GPUs a training that nobody chose."""
    data, epochs, time = config["data"], config["trainer"].get("max_epochs"), config["trainer"].get("max_time")
    if isinstance(epochs, int) and epochs < 1:
        raise UserError(f"trainer.max_epochs={epochs}: give a whole number from 1 on; trainer.max_time ends a run too.")
    if time:
        seconds_of(time, "trainer.max_time")
    if accelerator == "cpu" and not any(key_of(word) in CHOSEN for word in config["overrides"]):
        raise UserError(
            f"This would train {config['model']['name']} on {data['name']} at {data['image_size']} pixels for {epochs} "
            "epochs, days on a machine without a GPU: make train (experiment=quickstart) takes a minute, and "
            "trainer=cpu begins all the same."
        )


def check_root(config: Config) -> None:
    """Refuse a data.root that is no place of this machine."""
    root, reader = str(config["data"].get("root") or ""), str(config["data"].get("_target_")).rpartition(".")[0]
    if root and "://" not in root and reader in READERS and not Path(root).exists():
        raise UserError(
            f"data.root={root} does not exist: give a folder or file of this machine, or s3://bucket/prefix."
        )
