"""Reduce an untrusted config, of a checkpoint or a bucket, to option names of this clone and plain values.

The result names options whose yaml files are here, and gives numbers, switches and short words to keys that those
options have. It never holds a `_target_`, a path or an address. The config.yaml of a run below logs/ is trusted.
Imports no torch.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config import keys
from lockstep.config.compose import CONFIGS, chosen_options, compose, plain
from lockstep.config.schema import keys as listed_keys
from lockstep.config.suggestions import missing_option
from lockstep.process.errors import UserError
from lockstep.records.config import Config
from lockstep.records.folder import RunFolder, read_config

OF_CHECKPOINT = ("data", "task", "model", "loss", "metrics", "trainer")
OF_DATA = (*OF_CHECKPOINT, "augmentation", "seed")
OF_RUN = (*OF_DATA, "optimizer", "scheduler", "callbacks", "tags", "experiment_name", "test")
GROUPS = ("data", "task", "augmentation", "model", "loss", "optimizer", "scheduler", "trainer")
NEEDED = ("data", "task", "model")
NET = ("task", "model", "loss")  # a value of theirs that is not accepted would build another net
WEIGHTS = ("weights", "pretrained", "freeze")  # a checkpoint brings its weights
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,63}")  # without dot, slash and colon: no path, address or class
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")  # so no _target_
NAMES = {"model.name": re.compile(r"[A-Za-z0-9][\w-]*(\.[\w-]+)?"), "experiment_name": WORD, "tags": WORD}
PLACE = re.compile(r"root|dir|path|file|folder|images|weights|cache|teacher|ckpt|checkpoint|ur[il]|addr|peers|cfg$")
LARGEST = 2**31
ADDRESS = re.compile(r"addr|peers")


def accepted(stored: object, roots: tuple[str, ...], whose: str) -> tuple[dict[str, Any], list[str]]:
    """Return the part of an untrusted config that may be used, and the keys that were rejected.

    Args:
        roots: top-level keys to take from.
        whose: the config's owner for an error, e.g. "The checkpoint x.ckpt".

    Raises:
        UserError: it names an option that is not here, or a net that cannot be built here.
    """
    if not isinstance(stored, Mapping):
        raise UserError(f"{whose} carries no config: it was not written by Lockstep.")
    named, metrics = (found if isinstance(found := stored.get(k), Mapping) else {} for k in ("choices", "metrics"))
    choices: dict[str, str] = {}
    rejected: dict[str, Any] = {}

    def is_option(group: str, name: object) -> bool:
        return isinstance(name, str) and bool(WORD.fullmatch(name)) and not missing_option(group, name, (CONFIGS,))

    for group in (group for group in GROUPS if group in roots):
        name = named.get(group)
        if is_option(group, name) and not connects(group, str(name)):
            choices[group] = str(name)
        elif is_option(group, name):
            rejected[f"{group}={name}"] = None
        elif group in NEEDED or (group in NET and stored.get(group)):
            there = ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
            raise UserError(f"{whose} names {group}={name!r:.60}, which is not here: there is {there}.")
    if chosen := [name for name in metrics if is_option("metrics", name)]:
        choices["metrics"] = f"[{','.join(chosen)}]"
    here = plain(compose("train", [f"{group}={name}" for group, name in choices.items()]))
    values = {key: stored[key] for key in roots if key in stored and (key not in GROUPS or key in choices)}
    found = _accepted_values(values, here, "", rejected)
    for key, value in rejected.items():
        root, _, name = key.partition(".")
        if root in NET and name not in WEIGHTS and not (root == "task" and PLACE.search(name)):
            raise UserError(f"{whose} has {key}={value!r:.60}, which cannot be built here.")
    return {**found, "choices": choices}, list(rejected)


def connects(group: str, name: str) -> bool:
    """Return whether a trainer connects to the addresses of its yaml, as trainer=hivemind does.

    An untrusted config must not choose with whom a run exchanges its weights.
    """
    if group != "trainer":
        return False
    listed = listed_keys(CONFIGS / group / f"{name}.yaml", commented=False)
    return any(ADDRESS.search(key.name) for key in listed)


def _accepted_values(there: Config, here: Config, place: str, rejected: dict[str, Any]) -> dict[str, Any]:
    """Return the accepted values of `there` that differ from `here`."""
    found: dict[str, Any] = {}
    for name, stated in there.items():
        key, own = f"{place}{name}", here.get(name)
        value = list(stated) if isinstance(stated, tuple) else stated
        if (name in here and value == own) or keys.kind_of(key) is keys.MACHINE:
            continue
        if isinstance(value, Mapping) and isinstance(own, Mapping):
            if inner := _accepted_values(value, own, f"{key}.", rejected):
                found[name] = inner
        elif isinstance(name, str) and KEY.fullmatch(name) and _is_accepted(key, value, own, known=name in here):
            found[name] = value
        elif value is not None and value != {}:
            rejected[key] = value
    return found


def _is_accepted(key: str, value: object, own: object, *, known: bool) -> bool:
    """Return whether a value of an untrusted config may replace this clone's."""
    if not keys.may_be_foreign(key):
        return False
    if isinstance(value, list | tuple):
        items = [not isinstance(item, list | tuple) and isinstance(item, str) == (key == "tags") for item in value]
        return len(value) <= 64 and all(items) and all(_is_accepted(key, item, "", known=known) for item in value)
    if isinstance(value, str):  # a word takes the place of a word, or of nothing unless the key is for a place
        is_word = WORD.fullmatch(own) if isinstance(own, str) else own is None and not PLACE.search(key)
        return bool(known and (key in NAMES or is_word) and NAMES.get(key, WORD).fullmatch(value))
    if key.endswith("pretrained"):
        return value is False
    is_number = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= LARGEST
    return (value is None or is_number) and not isinstance(own, Mapping) and (known or key.startswith("model."))


def stored_config(path: Path, stored: object, logs: Path, roots: tuple[str, ...] = OF_CHECKPOINT) -> Config:
    """Return the config of the run of the checkpoint `path`: the run's own below `logs`, else what is accepted."""
    folder = RunFolder(path.resolve().parent.parent)
    is_own = path.parent.name == folder.checkpoints.name and folder.path.is_relative_to(logs.resolve())
    if is_own and folder.config.is_file():
        return read_config(folder.config)
    return accepted(stored, roots, f"The checkpoint {path}")[0]


def config_of_checkpoint(path: Path, stored: object, logs: Path, roots: tuple[str, ...] = OF_CHECKPOINT) -> Config:
    """Return the whole config to build a checkpoint's net with."""
    cfg = compose("train", [], stored_config(path, stored, logs, roots))
    return {**plain(cfg), "choices": chosen_options(cfg)}
