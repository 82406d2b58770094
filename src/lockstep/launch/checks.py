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
    refuse_days_on_cpu(config, accelerator)
    may_go_on = config.get("resume") or cluster.is_restarted
    resolve_batch(config, cluster, limit=math.inf if may_go_on else None)
    check_numbers(config)
    check_validation(config)
    if (config.get("s3") or {}).get("uri"):
        Bucket.of(config["s3"])
    if config.get("logbook") not in (None, "keep"):
        raise UserError(f"logbook={config['logbook']}: keep, or nothing.")
    if config.get("resume") == "auto" and not named_run(config, environ):
        raise UserError("resume=auto needs to know which run: give run_id=… (or RUN_ID), or resume=<run_id>.")
    if cluster.num_nodes == 1:  # else the others would wait: all ranks end together where one finds no images
        check_root(config)
    check_temporary_folder()
    if cluster.local_rank in (0, None):
        check_writable(Path(config["paths"]["log_dir"]))
        for sentence in faults(cluster, environ) if cluster.world_size > 1 and not cluster.has_agent else ():
            log.warning(sentence)


def refuse_days_on_cpu(config: Config, accelerator: str) -> None:
    """Refuse the default training, which takes GPUs, on a machine without one, unless somebody chose what to train."""
    chosen = any(key_of(word) in CHOSEN for word in config["overrides"])
    if accelerator == "gpu" or config["task_name"] != "train" or chosen:
        return
    data, epochs = config["data"], config["trainer"]["max_epochs"]
    raise UserError(
        f"This would train {config['model']['name']} on {data['name']} at {data['image_size']} pixels for {epochs} "
        "epochs, days on a machine without a GPU: make train (experiment=quickstart) takes a minute, and trainer=cpu "
        "begins all the same."
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


def check_temporary_folder() -> None:
    if len(folder := tempfile.gettempdir()) > MOST_OF_TMPDIR:
        raise UserError(f"TMPDIR={folder} is too long for the sockets of worker processes: set TMPDIR=/tmp.")


def check_root(config: Config) -> None:
    """Refuse a data.root that is no place of this machine."""
    data = config["data"]
    root, reader = str(data.get("root") or ""), str(data.get("_target_")).rpartition(".")[0]
    if root and "://" not in root and reader in READERS and not Path(root).exists():
        raise UserError(
            f"data.root={root} does not exist: give a folder or file of this machine, or s3://bucket/prefix."
        )


def check_numbers(config: Config) -> None:
    """Refuse a length of the training, a learning rate or a weight decay that none can be."""
    epochs, time = config["trainer"].get("max_epochs"), config["trainer"].get("max_time")
    if isinstance(epochs, int) and epochs < 1:
        raise UserError(f"trainer.max_epochs={epochs}: give a whole number from 1 on; trainer.max_time ends a run too.")
    if time:
        seconds_of(time, "trainer.max_time")
    for key, value in (config.get("optimizer") or {}).items():
        if isinstance(value, int | float) and value < 0 and (key.endswith("lr") or key == "weight_decay"):
            raise UserError(f"optimizer.{key}={value}: give a number from 0 on.")


def check_validation(config: Config) -> None:
    """Refuse an option that waits for a value of a validation if nothing validates."""
    if config["task_name"] != "train" or validates(config):
        return
    without = "This run validates nothing (data.val_fraction=0, data.num_val=0 or trainer.limit_val_batches=0)"
    nodes = {f"callbacks.{name}": node or {} for name, node in (config.get("callbacks") or {}).items()}
    for name, node in {**nodes, "scheduler": config.get("scheduler") or {}}.items():
        metric = str(node.get("monitor") or "")
        # The checkpoints do without their default if nothing validates
        default = config["task"].get("monitor") if node.get("_target_") == CHECKPOINTS else None
        waits = metric != default if default else metric.startswith("val/")
        if metric and waits:
            raise UserError(f"{without}, and {name}.monitor={metric} waits for a validation: leave one of the two out.")
    metric = str(config.get("optimized_metric"))
    if config.get("sweep_dir") and metric.startswith("val/"):
        raise UserError(f"{without}: give the sweep another optimized_metric than {metric}, as train/loss.")
