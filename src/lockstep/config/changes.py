"""Find the options that a resume changes, and those in which runs differ. Imports no torch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import keys
from lockstep.config.merge import CLASS_GROUPS
from lockstep.config.overrides import is_typed
from lockstep.config.schema import key_of
from lockstep.records.config import ABSENT, Config, lookup


@dataclass(frozen=True)
class Change:
    """An option whose value differs between a run and its resume.

    A value is ABSENT if the config lacks the option.
    """

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"was {_describe_value(self.before)}, now {_describe_value(self.now)}"


def changes_of(
    before: Config, now: Config, defaults_of: Callable[[Config], Config]
) -> list[Change]:
    """Return the options that affect the training and that a resume changes.

    An option that one config lacks does not count if another version of the code explains it.

    Args:
        before, now: the configs as runs store them, with `overrides` and `choices`.
        defaults_of: returns the config of a run's options without any override, unresolved.
    """
    changes = []
    for change in _find_changes(before, now, ""):
        is_absent = ABSENT in (change.before, change.now)
        if is_absent and _is_explained_by_version(change, before, now, defaults_of):
            continue
        changes.append(change)
    return changes


def _find_changes(before: Any, now: Any, key: str) -> Iterator[Change]:
    """Yield the options whose values differ. A missing value, null and an empty node are equal."""
    if _is_node_or_absent(before, now) and _is_node_or_absent(now, before):
        inner_before = {} if before is ABSENT else before
        inner_now = {} if now is ABSENT else now
        for name in dict.fromkeys([*inner_before, *inner_now]):
            inner_key = f"{key}.{name}" if key else str(name)
            yield from _find_changes(
                inner_before.get(name, ABSENT), inner_now.get(name, ABSENT), inner_key
            )
    elif _affects_training(key) and _null_if_empty(before) != _null_if_empty(now):
        yield Change(key, before, now)


def _is_node_or_absent(value: Any, other: Any) -> bool:
    return isinstance(value, Mapping) or (value is ABSENT and isinstance(other, Mapping))


def _affects_training(key: str) -> bool:
    """Return whether the value of a key affects the training.

    Names of chosen options do not count, because the values of the options are compared. The switch
    that scales the learning rates does not count, because the rates are compared.
    """
    has_training_kind = keys.kind_of(key) in (keys.RECIPE, keys.EXECUTION)
    return has_training_kind and keys.root_of(key) != "choices" and key != keys.LR_SCALING_KEY


def _null_if_empty(value: Any) -> Any:
    return None if value is ABSENT or value == {} else value


def _is_explained_by_version(
    change: Change, before: Config, now: Config, defaults_of: Callable[[Config], Config]
) -> bool:
    """Return whether a key is missing because another version of the code wrote that config.

    For example, a run that is older than `trainer.ema_decay` lacks this key, and its resume has it.
    A new key is explained if it has the default of its yaml. A key that has gone is explained if no
    yaml lists it, no override sets it, and no class may take it.
    """
    group = keys.root_of(change.key)
    if _has_other_option(group, before, now):
        return False
    overrides = [*(before.get("overrides") or ()), *(now.get("overrides") or ())]
    was_typed = is_typed(change.key, {key_of(str(override)) for override in overrides})
    default = lookup(defaults_of(now), change.key)
    if change.before is ABSENT:
        is_derived = isinstance(default, str) and "${" in default
        return default == change.now or (is_derived and not was_typed)
    return default is ABSENT and not was_typed and group not in CLASS_GROUPS


def _has_other_option(group: str, before: Config, now: Config) -> bool:
    choices_before = before.get("choices") or {}
    choices_now = now.get("choices") or {}
    return group in choices_before and choices_before[group] != choices_now.get(group)


def _describe_value(value: Any) -> str:
    """Return a value as text for a sentence. A node is described by its class."""
    if value is ABSENT:
        return "not set"
    if isinstance(value, Mapping):
        return str(value.get("_target_", dict(value)))
    return repr(value)


def differences(
    configs: Sequence[dict[str, Any]], is_shown: Callable[[str], bool] = keys.is_compared
) -> dict[str, list[Any]]:
    """Return {option: [its value in each flat config]} of options that differ; None if missing."""
    rows = {}
    for key in filter(is_shown, sorted(set().union(*configs))):
        values = [config.get(key) for config in configs]
        if len(set(map(json.dumps, values))) > 1:
            rows[key] = values
    return rows
