"""Any LightningModule (task._target_=…) and any LightningDataModule (data._target_=…), as another project has them."""

from typing import Any

import lightning.pytorch as pl

from lockstep.config.instantiate import build, options_of, resolve_target
from lockstep.config.schema import key_of
from lockstep.launch.plan import RunPlan
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError

OF_ALL = ("fold", "num_folds", "stratify")  # keys that train.yaml adds to the config of any data


def has_plain_data(config: Config) -> bool:
    """Return whether the data module is one of Lightning's own kind: it has no rank to be placed on."""
    return not hasattr(resolve_target(config["data"]["_target_"], "data._target_"), "place")


def has_plain_task(config: Config) -> bool:
    """Return whether the task builds its own net: its constructor does not ask for one."""
    target = (config.get("task") or {}).get("_target_")
    return bool(target) and "net" not in options_of(resolve_target(target, "task._target_"))[0]


def build_plain_data(plan: RunPlan) -> pl.LightningDataModule:
    """Return the data module that the config names.

    For a class that the command line names, keys of the default data set are left out.

    Raises:
        UserError: it is no LightningDataModule.
    """
    node, typed = plan.config["data"], {key_of(word) for word in plan.overrides}
    if "data._target_" in typed:
        node = {key: value for key, value in node.items() if f"data.{key}" in typed}
    data = build({key: value for key, value in node.items() if not (key in OF_ALL and value is None)})
    if not isinstance(data, pl.LightningDataModule):
        raise UserError(f"data._target_={node['_target_']} is no LightningDataModule.")
    return data


def build_plain_task(config: Config) -> Any:
    """Return the LightningModule of task=, which has its own net, loss and optimizers.

    Raises:
        UserError: it is no LightningModule.
    """
    module = build(dict(config["task"]))
    if not isinstance(module, pl.LightningModule):
        raise UserError(f"task._target_={config['task']['_target_']} is no LightningModule.")
    return module
