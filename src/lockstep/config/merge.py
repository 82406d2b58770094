"""Merge the stored config of a resumed run into a new one; new overrides take precedence.

Hydra does the merge: the run's options become overrides, its values a config in the ConfigStore.
An "option" is what is chosen from a config group (model=vit). `choices` holds the options that the
new overrides choose, by group. Imports no torch.

A run that began with `model=small_cnn model.dropout=0.5 seed=7`, by the default optimizer adamw,
is resumed with `optimizer=sgd trainer.max_epochs=9`:

    >>> stored = {
    ...     "choices": {"model": "small_cnn", "optimizer": "adamw"},
    ...     "overrides": ["model=small_cnn", "model.dropout=0.5", "seed=7", "run_id=r"],
    ...     "model": {"dropout": 0.5},
    ...     "optimizer": {"lr": 0.001},
    ...     "seed": 7,
    ...     "run_id": "r",
    ... }
    >>> overrides = ["optimizer=sgd", "trainer.max_epochs=9"]
    >>> choices = {"optimizer": "sgd"}

Its options are chosen again, except for the optimizer, which is another one now. They compose
`fresh_config`:

    >>> inherited_options(stored, choices, folders)
    ['model=small_cnn']
    >>> fresh_config = {
    ...     "model": {"dropout": 0.0},
    ...     "optimizer": {"lr": 0.1},
    ...     "seed": 42,
    ...     "run_id": None,
    ... }

Its values replace those of `fresh_config`, except for the new optimizer and the id of the start:

    >>> inherited_values(stored, overrides, choices, fresh_config)
    {'model': {'dropout': 0.5}, 'seed': 7}

The new overrides come last. The run records them behind those that still hold:

    >>> inherited_overrides(stored, overrides, choices)
    ['model=small_cnn', 'model.dropout=0.5', 'seed=7']
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import keys
from lockstep.config.hydra_versions import store_config
from lockstep.config.overrides import is_typed, set_or_add
from lockstep.config.schema import FREE_GROUPS, is_group, key_of
from lockstep.config.suggestions import missing_option
from lockstep.records.config import ABSENT, Config, lookup

# The classes of these groups may take keys that no yaml lists.
CLASS_GROUPS = ("task", "model", "loss", "metrics", "optimizer", "scheduler")


def inherited_options(
    stored: Config, choices: Mapping[str, str], folders: tuple[Path, ...]
) -> list[str]:
    """Return overrides that choose the run's options again, except in the groups of `choices`."""
    options = []
    for group, name in (stored.get("choices") or {}).items():
        # A group may no longer exist, such as `hardware=` of version 1.
        is_open = name and group not in choices and keys.root_of(group) != "hydra"
        if not is_open or not is_group(group.partition("/")[0], folders):
            continue

        # Several are written as metrics=[f1,kappa].
        names = str(name).strip("[]").split(",")
        node = stored.get(group)
        if any(missing_option(group, option.strip(" '"), folders) for option in names):
            # The yaml is gone or in a folder of --config-dir, or a class was named in its place.
            if not isinstance(node, Mapping):
                continue
            store_config(group=group, name=str(name), node=dict(node))
        options.append(f"{group}={name}")
    return options


def inherited_values(
    stored: Config, overrides: Sequence[str], choices: Mapping[str, str], fresh_config: Config
) -> dict[str, Any]:
    """Return the values of the run that its resume keeps.

    Args:
        overrides: the new overrides.
        fresh_config: the config composed without the run's values, with unresolved interpolations.
    """
    values = {key: value for key, value in stored.items() if keys.is_carried_over(key)}
    values.pop("choices", None)
    for group in _groups_chosen_anew(stored, choices):
        node = values.pop(group, None) or {}
        if group == "trainer":
            values[group] = _values_besides_placement(node, fresh_config[group])
    if "overrides" in stored:
        _fill_missing_keys(values, fresh_config)

    typed_keys = {key_of(override) for override in _stored_overrides(stored)}
    kept_values = _values_to_keep(values, fresh_config, typed_keys, "")
    if kept_values.get("optimizer"):
        kept_values["optimizer"] = _with_rates_scaled_once(
            kept_values["optimizer"], stored, overrides
        )
    return kept_values


def _stored_overrides(stored: Config) -> list[str]:
    return [str(override) for override in stored.get("overrides") or ()]


def _fill_missing_keys(values: dict[str, Any], fresh_config: Config) -> None:
    """Set to null the callbacks, loggers and metrics that the run had removed.

    A key that the run's version did not have gets the value that keeps what that version did. A
    config without overrides is incomplete, so this must not be called for it.
    """
    for group in FREE_GROUPS:
        if isinstance(values.get(group), Mapping):
            values[group] = {**dict.fromkeys(fresh_config.get(group) or ()), **values[group]}
    for dotted, value in keys.LEGACY_DEFAULTS.items():
        group, _, key = dotted.partition(".")
        node = values.get(group)
        if isinstance(node, Mapping) and key not in node and key in fresh_config.get(group, {}):
            values[group] = {**node, key: value}


def repeatable_overrides(
    overrides: Sequence[str], stored: Config, values: Config, fresh_config: Config
) -> list[str]:
    """Return the new overrides in a form that has the same effect at every start of a run.

    `+key=value` adds a key that the run may have by now; `~key` removes one that it may have lost.
    Keys that the run itself removed are removed again, because `fresh_config` has them.

    Args:
        overrides: the new overrides.
        values: the result of `inherited_values`.
        fresh_config: the same as for `inherited_values`.
    """
    overrides_before = _stored_overrides(stored)
    new_keys = {key_of(override) for override in overrides}
    changes = []
    for override in overrides_before:
        key = key_of(override)
        if override.startswith("~") and key not in new_keys and _has_key(values, fresh_config, key):
            changes.append(override)

    repeated = _repeated_scaling_options(overrides, overrides_before)
    for override in overrides:
        if override.startswith("~"):
            # Hydra says what is wrong with the removal of a key that the run never had.
            if _has_key(values, fresh_config, key_of(override)) or override not in overrides_before:
                changes.append(override)
        elif override not in repeated:
            changes.append(set_or_add(override) if override.startswith("+") else override)
    return changes


def inherited_overrides(
    stored: Config, overrides: Sequence[str], choices: Mapping[str, str]
) -> list[str]:
    """Return the run's overrides that the new ones do not replace."""
    new_keys = {key_of(override) for override in overrides}
    chosen_anew = _groups_chosen_anew(stored, choices)
    kept_overrides = []
    for override in _stored_overrides(stored):
        key = key_of(override)
        belongs_to_other_option = keys.root_of(key) in chosen_anew
        if key.startswith("trainer."):
            # Another trainer takes over all values but those that place the ranks.
            belongs_to_other_option = belongs_to_other_option and keys.is_placement(key)
        is_kept = keys.is_carried_over(key) and key not in keys.RECOMPUTED_KEYS
        if is_kept and key not in new_keys and not belongs_to_other_option:
            kept_overrides.append(override)
    return kept_overrides


def _groups_chosen_anew(stored: Config, choices: Mapping[str, str]) -> list[str]:
    choices_before = stored.get("choices") or {}
    return [group for group, name in choices.items() if name != choices_before.get(group)]


def _values_besides_placement(trainer: Config, fresh_config: Config) -> dict[str, Any]:
    """Return the values of a trainer that another one takes over: all that do not place ranks."""
    values = {}
    for key, value in trainer.items():
        if key in fresh_config and not keys.is_placement(f"trainer.{key}"):
            values[key] = value
    return values


def _with_rates_scaled_once(
    optimizer: Config, stored: Config, overrides: Sequence[str]
) -> dict[str, Any]:
    """Return the optimizer's values so that its rates, which are scaled, are not scaled again."""
    is_scaled_now = any(key_of(override) == keys.LR_SCALING_KEY for override in overrides)
    if is_scaled_now and "overrides" not in stored:
        # A config from a bucket does not say which rates were typed. The command line does.
        return {key: value for key, value in optimizer.items() if not keys.is_rate(key)}
    if optimizer.get("scale_lr_with_batch"):
        return {**optimizer, "scale_lr_with_batch": False}
    return dict(optimizer)


def _repeated_scaling_options(
    overrides: Sequence[str], overrides_before: Sequence[str]
) -> list[str]:
    """Return the overrides of the optimizer that the run already had, if they scale its rates.

    The run's values hold the scaled rates, which would be scaled twice.
    """
    options = [override for override in overrides if key_of(override).startswith("optimizer.")]
    repeated = [override for override in options if override in overrides_before]
    is_scaled = any(key_of(override) == keys.LR_SCALING_KEY for override in repeated)
    return repeated if is_scaled else []


def _has_key(values: Config, fresh_config: Config, key: str) -> bool:
    """Return whether the merge of both has a key; `values` has null for a removed callback."""
    value = lookup(values, key)
    if value is None and keys.root_of(key) in FREE_GROUPS:
        return False
    return value is not ABSENT or lookup(fresh_config, key) is not ABSENT


def _values_to_keep(
    values: Config, fresh_config: Config, typed_keys: set[str], prefix: str
) -> dict[str, Any]:
    """Return the run's values except those that depend on the code version or the machine."""
    kept_values = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        default = fresh_config.get(name)
        if not _is_kept(key, name in fresh_config, default, typed_keys):
            continue
        if name == "_target_" and value != default and key not in typed_keys and _is_gone(value):
            # The module of this class has been moved, so the class in the option's yaml counts.
            continue
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            kept_values[name] = _values_to_keep(value, default, typed_keys, f"{key}.")
        else:
            kept_values[name] = value
    return kept_values


def _is_kept(key: str, is_listed: bool, default: Any, typed_keys: set[str]) -> bool:
    """Return whether a resume keeps the run's value of a key.

    A resume keeps a value that the run overrode (`typed_keys`). An interpolation in the
    configs replaces any other value. A key that is not in the configs is dropped, unless its class
    may take it.
    """
    if key in keys.RECOMPUTED_KEYS:
        return False
    if is_typed(key, typed_keys):
        return True
    is_derived = key in keys.RESOLVED_KEYS or (isinstance(default, str) and "${" in default)
    group, _, name = key.partition(".")
    may_be_new = group in CLASS_GROUPS or (group in FREE_GROUPS and name and "." not in name)
    return (is_listed or bool(may_be_new)) and not is_derived


def _is_gone(target: Any) -> bool:
    """Return whether the module of a `_target_` does not exist any more."""
    module = str(target).rpartition(".")[0]
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):
        return True
