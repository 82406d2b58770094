"""What is refused before torch is imported: images that are not there, what waits for a validation that never comes."""

from pathlib import Path

from lockstep.runs.config import Config
from lockstep.runs.errors import UserError

CHECKPOINTS = "lockstep.callbacks.checkpoints.Checkpoints"
DEFAULT_MONITOR = "val/acc"  # of the checkpoints, which do without it where nothing validates
# Modules of src/data whose root is there or is an address; a class of the user's own may make its root
READERS = ("data.cifar10", "data.csv", "data.image_folder", "data.mnist", "data.parquet", "data.webdataset")


def validates(config: Config) -> bool:
    """Not with data.val_fraction=0, data.num_val=0 or trainer.limit_val_batches=0."""
    data = config["data"]
    stated = data.get("val_fraction", 0.1) if data.get("num_val") is None else data["num_val"]
    return stated != 0 and config["trainer"].get("limit_val_batches", 1.0) != 0


def check_root(config: Config) -> None:
    """
    Raises:
        UserError: data.root is no place of this machine.
    """
    data = config["data"]
    root, reader = str(data.get("root") or ""), str(data.get("_target_")).rpartition(".")[0]
    if root and "://" not in root and reader in READERS and not Path(root).exists():
        raise UserError(
            f"data.root={root} does not exist: give a folder or file of this machine, or s3://bucket/prefix."
        )


def check_numbers(config: Config) -> None:
    """Of a training, before any work.

    Raises:
        UserError: a number of epochs or of the optimizer that none can be.
    """
    epochs = config["trainer"].get("max_epochs")
    if isinstance(epochs, int) and epochs < 1:
        raise UserError(f"trainer.max_epochs={epochs}: give a whole number from 1 on; trainer.max_time ends a run too.")
    for key, value in (config.get("optimizer") or {}).items():
        if isinstance(value, int | float) and value < 0 and (key.endswith("lr") or key == "weight_decay"):
            raise UserError(f"optimizer.{key}={value}: give a number from 0 on.")


def check_validation(config: Config) -> None:
    """Of a training, before any work.

    Raises:
        UserError: nothing validates, and an option waits for a value of a validation.
    """
    if config["task_name"] != "train" or validates(config):
        return
    without = "This run validates nothing (data.val_fraction=0, data.num_val=0 or trainer.limit_val_batches=0)"
    for key, metric in _monitored(config):
        raise UserError(f"{without}, and {key}={metric} waits for a validation: leave one of the two out.")
    metric = str(config.get("optimized_metric"))
    if config.get("sweep_dir") and metric.startswith("val/"):
        raise UserError(f"{without}: give the sweep another optimized_metric than {metric}, as train/loss.")


def _monitored(config: Config) -> list[tuple[str, str]]:
    """Options that name a metric of a validation, with it."""
    nodes = {f"callbacks.{name}": node for name, node in (config.get("callbacks") or {}).items()}
    nodes["scheduler"] = config.get("scheduler")
    found = []
    for name, node in nodes.items():
        metric = str((node or {}).get("monitor") or "")
        chooses = (node or {}).get("_target_") == CHECKPOINTS
        if metric and (metric != DEFAULT_MONITOR if chooses else metric.startswith("val/")):
            found.append((f"{name}.monitor", metric))
    return found
