"""Reduce an untrusted config, of a checkpoint or a bucket, to option names and plain values.

The result names options whose yaml files are in this clone, and gives numbers, switches and short
words to keys that those options have. It never holds a `_target_`, a path or an address. The
config.yaml of a run below logs/ is trusted. Imports no torch.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import keys
from lockstep.config.compose import CONFIGS, chosen_options, compose, plain
from lockstep.config.schema import keys_in_yaml
from lockstep.config.suggestions import missing_option
from lockstep.process.errors import UserError
from lockstep.records.config import Config
from lockstep.records.folder import RunFolder, read_config

# The top-level keys that build the net of a checkpoint, then its data too, then a whole run.
CHECKPOINT_ROOTS = ("data", "task", "model", "loss", "metrics", "trainer")
DATA_ROOTS = (*CHECKPOINT_ROOTS, "augmentation", "seed")
RUN_ROOTS = (*DATA_ROOTS, "optimizer", "scheduler", "callbacks", "tags", "experiment_name", "test")
GROUPS = ("data", "task", "augmentation", "model", "loss", "optimizer", "scheduler", "trainer")
REQUIRED_GROUPS = ("data", "task", "model")
# A rejected value of these groups would build another net.
NET_GROUPS = ("task", "model", "loss")
# These options of a net may be rejected, because a checkpoint brings its weights.
WEIGHT_OPTIONS = ("weights", "pretrained", "freeze")
# A word has no dot, slash or colon, so that it is no path, address or class.
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,63}")
# A key begins with a letter, so that it is no _target_.
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
# These keys have patterns of their own.
NAMES = {
    "model.name": re.compile(r"[A-Za-z0-9][\w-]*(\.[\w-]+)?"),
    "experiment_name": WORD,
    "tags": WORD,
}
LOCATION_NAME = re.compile(
    r"root|dir|path|file|folder|images|weights|cache|teacher|ckpt|checkpoint|ur[il]|addr|peers"
    # The key model_cfg names a file, the key cfg_scale does not.
    r"|cfg$"
)
ADDRESS_NAME = re.compile(r"addr|peers")
LARGEST_NUMBER = keys.LARGEST_SEED
LONGEST_LIST = 64


class Accepted(NamedTuple):
    """An untrusted config, or a part of it, after the check.

    Attributes:
        values: the values that may be used.
        rejected: the values that may not be used, by their dotted keys.
    """

    values: dict[str, Any]
    rejected: dict[str, Any]


def accept_config(stored: object, roots: tuple[str, ...], owner: str) -> Accepted:
    """Return the part of an untrusted config that may be used.

    Args:
        roots: the top-level keys of which values may be used.
        owner: the config's owner for an error, e.g. "The checkpoint x.ckpt".

    Raises:
        UserError: the config names an option that this clone does not have, or a net that cannot
            be built here.
    """
    if not isinstance(stored, Mapping):
        raise UserError(f"{owner} carries no config: it was not written by Lockstep.")
    choices, rejected_choices = _accept_choices(stored, roots, owner)
    defaults = plain(compose("train", [f"{group}={name}" for group, name in choices.items()]))

    candidates = {}
    for root in roots:
        if root in stored and (root in choices or root not in GROUPS):
            candidates[root] = stored[root]
    values, rejected = _accept_values(candidates, defaults)
    for key, value in rejected.items():
        if _builds_another_net(key):
            raise UserError(f"{owner} has {key}={value!r:.60}, which cannot be built here.")
    return Accepted({**values, "choices": choices}, {**rejected_choices, **rejected})


def _accept_choices(stored: Config, roots: tuple[str, ...], owner: str) -> Accepted:
    """Return the options that the config chooses and this clone has, by group."""
    named = _mapping_or_empty(stored.get("choices"))
    choices = {}
    rejected = {}
    for group in (group for group in GROUPS if group in roots):
        name = named.get(group)
        if not _is_option(group, name):
            if group in REQUIRED_GROUPS or (group in NET_GROUPS and stored.get(group)):
                options = ", ".join(sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")))
                raise UserError(
                    f"{owner} names {group}={name!r:.60}, which is not here: this clone has "
                    f"{options}."
                )
        elif connects_to_peers(group, str(name)):
            rejected[group] = name
        else:
            choices[group] = str(name)

    metrics = [
        name for name in _mapping_or_empty(stored.get("metrics")) if _is_option("metrics", name)
    ]
    if metrics:
        choices["metrics"] = f"[{','.join(metrics)}]"
    return Accepted(choices, rejected)


def _mapping_or_empty(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


def _is_option(group: str, name: object) -> bool:
    """Return whether this clone has a yaml file of that name in the group."""
    if not isinstance(name, str) or not WORD.fullmatch(name):
        return False
    return not missing_option(group, name, (CONFIGS,))


def connects_to_peers(group: str, name: str) -> bool:
    """Return whether a trainer connects to the addresses of its yaml, as trainer=hivemind does.

    An untrusted config must not choose with whom a run exchanges its weights.
    """
    if group != "trainer":
        return False
    listed = keys_in_yaml(CONFIGS / group / f"{name}.yaml", commented=False)
    return any(ADDRESS_NAME.search(key.name) for key in listed)


def _builds_another_net(key: str) -> bool:
    """Return whether another net would be built without the value of a rejected key."""
    root, _, name = key.partition(".")
    if root not in NET_GROUPS or name in WEIGHT_OPTIONS:
        return False
    return root != "task" or not LOCATION_NAME.search(name)


def _accept_values(stored: Config, defaults: Config, prefix: str = "") -> Accepted:
    """Return the values that differ from the defaults of this clone.

    Args:
        prefix: the beginning of the keys in `stored`, as "model.".
    """
    values: dict[str, Any] = {}
    rejected: dict[str, Any] = {}
    for name, value in stored.items():
        key = f"{prefix}{name}"
        default = defaults.get(name)
        value = _to_list(value)
        # This machine keeps its own devices and workers.
        if keys.kind_of(key) is keys.MACHINE:
            continue
        if name in defaults and value == default:
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            inner = _accept_values(value, default, f"{key}.")
            rejected.update(inner.rejected)
            if inner.values:
                values[name] = inner.values
        elif _is_key(name) and _is_accepted(key, value, default, is_listed=name in defaults):
            values[name] = value
        elif value not in (None, {}):
            rejected[key] = value
    return Accepted(values, rejected)


def _to_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _is_key(name: object) -> bool:
    return isinstance(name, str) and KEY.fullmatch(name) is not None


def _is_accepted(key: str, value: object, default: object, *, is_listed: bool) -> bool:
    """Return whether a value of an untrusted config may replace this clone's.

    Args:
        is_listed: a yaml of this clone has the key.
    """
    # This machine keeps its own paths and addresses.
    if not keys.may_be_foreign(key):
        return False
    if isinstance(value, list):
        return len(value) <= LONGEST_LIST and all(
            _accepts_item(key, item, is_listed=is_listed) for item in value
        )
    if isinstance(value, str):
        return is_listed and _accepts_word(key, value, default)
    return _accepts_number(key, value, default, is_listed=is_listed)


def _accepts_item(key: str, item: object, *, is_listed: bool) -> bool:
    # The list of tags holds words, and any other list holds numbers.
    if isinstance(item, list | tuple) or isinstance(item, str) != (key == "tags"):
        return False
    return _is_accepted(key, item, "", is_listed=is_listed)


def _accepts_word(key: str, word: str, default: object) -> bool:
    if key in NAMES:
        return NAMES[key].fullmatch(word) is not None
    if not WORD.fullmatch(word):
        return False
    # A word may replace a word.
    if isinstance(default, str):
        return WORD.fullmatch(default) is not None
    # A word may replace null, unless the key is for a path or an address.
    return default is None and not LOCATION_NAME.search(key)


def _accepts_number(key: str, number: object, default: object, *, is_listed: bool) -> bool:
    # Only the weights of the checkpoint are loaded.
    if key.endswith("pretrained"):
        return number is False
    # A number may replace a plain value. A model may have arguments that no yaml lists.
    if isinstance(default, Mapping) or not (is_listed or key.startswith("model.")):
        return False
    # This comparison refuses nan and inf, too.
    return number is None or (isinstance(number, int | float) and abs(number) <= LARGEST_NUMBER)


def choose_stored_config(
    path: Path, checkpoint_config: object, logs: Path, roots: tuple[str, ...] = CHECKPOINT_ROOTS
) -> Config:
    """Return the config of a checkpoint's run.

    Args:
        path: the checkpoint. If it lies in a run folder below `logs`, the config of that folder is
            returned.
        checkpoint_config: the config in the checkpoint. Its accepted part is returned otherwise.
    """
    folder = RunFolder(path.resolve().parent.parent)
    is_in_run = path.parent.name == folder.checkpoints.name
    if is_in_run and folder.path.is_relative_to(logs.resolve()) and folder.config_path.is_file():
        return read_config(folder.config_path)
    return accept_config(checkpoint_config, roots, f"The checkpoint {path}").values


def config_of_checkpoint(
    path: Path, checkpoint_config: object, logs: Path, roots: tuple[str, ...] = CHECKPOINT_ROOTS
) -> Config:
    """Return the whole config to build a checkpoint's net with."""
    cfg = compose("train", [], choose_stored_config(path, checkpoint_config, logs, roots))
    return {**plain(cfg), "choices": chosen_options(cfg)}
