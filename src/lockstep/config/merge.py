"""Merge the stored config of a resumed run into a newly composed one; new overrides take precedence.

Hydra does the merge: the run's options become overrides, and its values a config in the ConfigStore. An "option" is
what is chosen from a config group (model=vit). `named` holds the options that the new overrides choose, by group.
Imports no torch.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.schema import FREE_GROUPS, is_group, key_of, missing_option
from lockstep.runs.config import Config

# Keys of a trainer that place the ranks. Another trainer has its own.
PLACEMENT = ("launch", "accelerator", "devices", "num_nodes", "strategy", "accumulate_grad_batches")
OF_MACHINE = ("trainer.accelerator", "trainer.devices", "trainer.num_nodes")  # config.yaml holds what `auto` came to
OF_START = ("choices", "overrides", "task_name", "resume", "run_id", "sweep_dir")
RECOMPUTED = ("trainer.accumulate_grad_batches", "paths.log_dir")  # accumulation depends on the number of ranks
CLASS_GROUPS = ("task", "model", "loss", "metrics", "optimizer", "scheduler")  # whose classes take keys of no yaml


def options_of(stored: Config, named: Mapping[str, str], folders: tuple[Path, ...]) -> list[str]:
    """Return overrides that choose the run's option of each group of which `named` has none."""
    from hydra.core.config_store import ConfigStore

    words = []
    for group, name in (stored.get("choices") or {}).items():
        # A group may no longer exist, such as `hardware=` of version 1
        if name and group not in (*named, "hydra") and is_group(group.partition("/")[0], folders):
            names, own = str(name).strip("[]").split(","), stored.get(group)  # metrics=[f1,kappa]
            is_here = not any(missing_option(group, each.strip(" '"), folders) for each in names)
            if not is_here and isinstance(own, Mapping):  # its yaml is gone, or in a folder of --config-dir
                ConfigStore.instance().store(group=group, name=str(name), node=dict(own))
            if is_here or isinstance(own, Mapping):
                words.append(f"{group}={name}")
    return words


def values_of(stored: Config, named: Mapping[str, str], fresh: Config) -> list[str]:
    """Store the run's values in the ConfigStore; return the override that merges them.

    Args:
        fresh: the config composed without those values, as plain containers with unresolved interpolations.
    """
    from hydra.core.config_store import ConfigStore

    values = {key: value for key, value in stored.items() if key not in OF_START}
    for group in _chosen_anew(stored, named):
        old = values.pop(group, None) or {}
        if group == "trainer":
            values[group] = {key: value for key, value in old.items() if key in fresh[group] and key not in PLACEMENT}
    for group in FREE_GROUPS:  # keep entries removed that the run had removed; a config without overrides is incomplete
        if "overrides" in stored and isinstance(values.get(group), Mapping):
            values[group] = {**dict.fromkeys(fresh.get(group) or ()), **values[group]}
    node = _kept(values, fresh, {key_of(str(word)) for word in stored.get("overrides") or ()}, "")
    if (node.get("optimizer") or {}).get("scale_lr_with_batch"):
        node["optimizer"]["scale_lr_with_batch"] = False  # config.yaml holds the scaled rates
    ConfigStore.instance().store(group="resumed", name="run", node=node, package="_global_")
    return ["+resumed=run"]


def overrides_of(stored: Config, overrides: list[str], named: Mapping[str, str]) -> list[str]:
    """Return the run's overrides that the new ones do not replace."""
    replaced, anew, kept = {*map(key_of, overrides), *OF_START, *RECOMPUTED}, _chosen_anew(stored, named), []
    for word in map(str, stored.get("overrides") or ()):
        group, _, name = key_of(word).partition(".")
        if key_of(word) not in replaced and (group not in anew or (group == "trainer" and name not in PLACEMENT)):
            kept.append(word)
    return kept


def _chosen_anew(stored: Config, named: Mapping[str, str]) -> list[str]:
    choices = stored.get("choices") or {}
    return [group for group, name in named.items() if name != choices.get(group)]


def _kept(values: Config, fresh: Config, typed: set[str], place: str) -> dict[str, Any]:
    """Return the run's values to carry over: those that depend on the code version or the machine are dropped.

    A key that is an interpolation in the configs keeps it, and a key that is no longer in the configs is dropped,
    unless the run overrode the key (`typed`), or the class of its group may accept it (CLASS_GROUPS).
    A class whose module was moved meanwhile gives way to that of the option's yaml.
    """
    kept = {}
    for name, value in values.items():
        key, now = f"{place}{name}", fresh.get(name)
        if name == "_target_" and value != now and key not in typed and _is_gone(value):
            continue
        stated = key in typed or any("." in other and key.startswith(f"{other}.") for other in typed)
        may_be_new = name in fresh or place[:-1] in FREE_GROUPS or key.split(".")[0] in CLASS_GROUPS
        is_derived = key in OF_MACHINE or (isinstance(now, str) and "${" in now)
        if key not in RECOMPUTED and (stated or (may_be_new and not is_derived)):
            both = isinstance(value, Mapping) and isinstance(now, Mapping)
            kept[name] = _kept(value, now or {}, typed, f"{key}.") if both else value
    return kept


def _is_gone(target: Any) -> bool:
    """Return whether the module of a `_target_` does not exist any more."""
    module = str(target).rpartition(".")[0]
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True
