"""Early refusals, before torch is imported: options that cannot work, and places that are not there."""

import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lockstep.config.schema import key_of
from lockstep.launch.launchers import Cluster, faults, named_run
from lockstep.launch.plan import CHECKPOINTS, resolve_batch, validates
from lockstep.runs.config import Config, seconds_of
from lockstep.runs.errors import UserError, is_full
from lockstep.storage.s3 import Bucket

log = logging.getLogger(__name__)

# Modules of src/data whose root is there or is an address; a class of the user's own may make its root
READERS = ("data.cifar10", "data.image_folder", "data.mnist", "data.table", "data.webdataset")
CHOSEN = ("experiment", "debug", "data", "model", "trainer", "trainer.accelerator", "trainer.max_steps",
          "trainer.limit_train_batches", "resume")  # fmt: skip
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
    if not cluster.local_rank:
        check_writable(Path(config["paths"]["log_dir"]))
        for sentence in faults(cluster, environ) if cluster.world_size > 1 and not cluster.has_agent else ():
            log.warning(sentence)


def check_training(config: Config, accelerator: str) -> None:
    """Refuse a length or a monitor that cannot be, and the default training, which takes GPUs, where none is.

    On a machine without GPUs somebody has to choose what is trained.
    """
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
    for name, node in (config.get("callbacks") or {}).items() if not validates(config) else ():
        metric = (node or {}).get("monitor")
        # The checkpoints do without their default if nothing validates
        default = config["task"].get("monitor") if metric and node["_target_"] == CHECKPOINTS else None
        if metric and (metric != default if default else metric.startswith("val/")):
            raise UserError(
                "This run validates nothing (data.val_fraction=0, data.num_val=0 or trainer.limit_val_batches=0), and "
                f"callbacks.{name}.monitor={metric} waits for a validation: leave one of the two out."
            )


def check_writable(logs: Path) -> None:
    """Refuse a folder for runs that cannot be made or written."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=logs):
            pass
    except OSError as error:
        if is_full(error):
            raise
        reason = f"{logs} cannot be written ({error.strerror})"
        raise UserError(f"{reason}: give another place with paths.log_dir=.") from None


def check_root(config: Config) -> None:
    """Refuse a data.root that is no place of this machine."""
    root, reader = str(config["data"].get("root") or ""), str(config["data"].get("_target_")).rpartition(".")[0]
    if root and "://" not in root and reader in READERS and not Path(root).exists():
        raise UserError(
            f"data.root={root} does not exist: give a folder or file of this machine, or s3://bucket/prefix."
        )
