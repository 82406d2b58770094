"""The options in which a resume differs from its run, and runs from each other; without torch."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.config import keys
from lockstep.config.merge import CLASS_GROUPS
from lockstep.config.schema import key_of
from lockstep.records.config import Config

ABSENT = object()


@dataclass(frozen=True)
class Change:
    """An option of a run and its value in a resume; ABSENT where a config lacks it."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"was {_shown(self.before)}, now {_shown(self.now)}"


def changes_of(
    before: Config, now: Config, defaults_of: Callable[[Config], Config]
) -> list[Change]:
    """Return the options that a resume changes, of those that count for the training.

    An option that one config lacks is no change if another version of the code explains it.

    Args:
        before, now: the configs as runs store them, with `overrides` and `choices`.
        defaults_of: returns the config of a run's options without any override, unresolved.
    """
    changes = []
    for change in _walk(before, now, ""):
        is_absent = ABSENT in (change.before, change.now)
        if is_absent and _is_of_version(change, before, now, defaults_of):
            continue
        changes.append(change)
    return changes


def _walk(before: Any, now: Any, key: str) -> Iterator[Change]:
    """Yield the different values; a missing value and null are one."""
    is_node = isinstance(before, Mapping) or isinstance(now, Mapping)
    if is_node and all(value is ABSENT or isinstance(value, Mapping) for value in (before, now)):
        inner_before = {} if before is ABSENT else before
        inner_now = {} if now is ABSENT else now
        for name in dict.fromkeys([*inner_before, *inner_now]):
            inner_key = f"{key}.{name}" if key else str(name)
            yield from _walk(inner_before.get(name, ABSENT), inner_now.get(name, ABSENT), inner_key)
    elif _counts(key) and _or_none(before) != _or_none(now):
        yield Change(key, before, now)


def _counts(key: str) -> bool:
    """Return whether a value says how a run is trained.

    The names of options and the switch that scales the rates do not: values and rates do.
    """
    is_trained = keys.kind_of(key) in (keys.RECIPE, keys.EXECUTION)
    return is_trained and keys.root_of(key) != "choices" and key != keys.SCALES_RATES


def _or_none(value: Any) -> Any:
    return None if value is ABSENT or value == {} else value


def _is_of_version(
    change: Change, before: Config, now: Config, defaults_of: Callable[[Config], Config]
) -> bool:
    """Return whether a key is missing because the other config is of another version of the code.

    A key that is new has the default of its yaml. One that is gone is in no yaml, no override
    states it, and its class was not asked to take it.
    """
    if _is_chosen_anew(keys.root_of(change.key), before, now):
        return False
    is_typed = any(_is_stated(change.key, config) for config in (before, now))
    default = _at(defaults_of(now), change.key)
    if change.before is ABSENT:
        is_derived = isinstance(default, str) and "${" in default
        return default == change.now or (is_derived and not is_typed)
    return default is ABSENT and not is_typed and keys.root_of(change.key) not in CLASS_GROUPS


def _is_chosen_anew(group: str, before: Config, now: Config) -> bool:
    choices_before, choices_now = (config.get("choices") or {} for config in (before, now))
    return group in choices_before and choices_before[group] != choices_now.get(group)


def _is_stated(key: str, config: Config) -> bool:
    """Return whether an override of a config states or removes a key or a parent of it."""
    stated = [key_of(str(word)) for word in config.get("overrides") or ()]
    return any(key == word or key.startswith(f"{word}.") for word in stated if "." in word)


def _at(node: Any, key: str) -> Any:
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return ABSENT
        node = node[name]
    return node


def _shown(value: Any) -> str:
    """Return a value for a sentence; of a node its class."""
    if value is ABSENT:
        return "not set"
    if isinstance(value, Mapping):
        return str(value.get("_target_", dict(value)))
    return repr(value)


def differences(
    configs: Sequence[dict[str, Any]], is_shown: Callable[[str], bool] = keys.is_compared
) -> dict[str, list[Any]]:
    """Return {option: [value in each flat config]} where they differ; None for a missing one."""
    rows = {key: [config.get(key) for config in configs] for key in sorted(set().union(*configs))}
    return {
        key: values
        for key, values in rows.items()
        if is_shown(key) and len(set(map(json.dumps, values))) > 1
    }
