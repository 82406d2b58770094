"""Check the keys and types of a composed config. The default in a yaml gives the type of a key."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import keys
from lockstep.config.schema import FREE_GROUPS, REFUSED_TRAINER_KEYS, key_of, trainer_arguments
from lockstep.config.suggestions import unknown_key
from lockstep.process.errors import UserError
from lockstep.records.config import Config

TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True)
class Fault:
    """A wrong key or value of a config.

    Args:
        expected: what to give instead; None if nothing reads the key.
    """

    key: str
    value: Any
    expected: str | None


def check_config(
    config: Config, options: Config, overrides: list[str], folders: tuple[Path, ...]
) -> None:
    """Check every key and type of a composed config.

    Args:
        config: the composed config as plain dicts, with interpolations as they are written.
        options: the chosen options alone, without the values of an experiment or of the command
            line.
        folders: the folders of configs, configs/ first.

    Raises:
        UserError: it names the first wrong key and the nearest valid one.
    """
    fault = next(_find_faults(config, options), None)
    if fault is None:
        return

    if fault.expected:
        sentence = f"{fault.key}={fault.value!r}: give {fault.expected}."
    else:
        sentence = unknown_key(fault.key, options, folders)
    if overrides and not any(_concerns_key(override, fault.key) for override in overrides):
        sentence += " It is in a yaml of the experiment or the callbacks."
    raise UserError(sentence)


def _concerns_key(override: str, key: str) -> bool:
    typed_key = key_of(override)
    return typed_key.startswith(key) or key.startswith(typed_key)


def _find_faults(config: Config, options: Config, prefix: str = "") -> Iterator[Fault]:
    """Yield each wrong key or value of a node.

    Args:
        prefix: the beginning of the node's keys, as `trainer.`.
    """
    for name, value in config.items():
        key = f"{prefix}{name}"
        if name not in options:
            if not _may_be_read(prefix[:-1], str(name), value, config, options):
                yield Fault(key, value, None)
            continue

        default = options[name]
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from _find_faults(value, default, f"{key}.")
            continue
        expected = _expected_value(key, value, default)
        if expected:
            yield Fault(key, value, expected)


def _expected_value(key: str, value: Any, default: Any) -> str | None:
    """Return what to give in place of a value; None if it is right."""
    if key in keys.TEXT_KEYS and isinstance(value, int | float):
        return f"it in quotes: '{value}'"
    if _is_valid(key, value, default):
        return None
    if key == "trainer.strategy":
        return "a strategy as trainer=ddp, trainer=fsdp and the like"
    if not isinstance(default, Mapping) or not default:
        return _expected_type(value, default)
    sentence = f"one of its keys, as {key}.KEY=VALUE"
    if "." not in key:
        sentence += f"; a yaml chooses an option in its defaults: `- override /{key}: {value}`"
    return sentence


def _is_valid(key: str, value: Any, default: Any) -> bool:
    # Without max_epochs a training ends by max_steps or max_time.
    if value is None and key.startswith("trainer.") and key != "trainer.max_epochs":
        return type(default) not in (int, float)
    if value is None or value in (default, keys.WORD_OF_NUMBER.get(key)):
        return True
    # The type of an interpolation is known when it has been resolved.
    if isinstance(value, str) and "${" in value:
        return True
    return isinstance(value, Mapping) and key in keys.NODE_KEYS


def _expected_type(value: Any, default: Any) -> str | None:
    default_type = type(default)
    is_whole_for_float = default_type is float and type(value) is int
    if default_type not in TYPE_NAMES or type(value) is default_type or is_whole_for_float:
        return None
    return f"{TYPE_NAMES[default_type]} (the default is {str(default).lower()})"


def _may_be_read(prefix: str, name: str, value: Any, parent: Config, options: Config) -> bool:
    """Return whether something may read a key that no yaml lists."""
    if prefix == "trainer":
        if name in REFUSED_TRAINER_KEYS:
            raise UserError(f"trainer.{name} cannot be given: {REFUSED_TRAINER_KEYS[name]}.")
        return name in trainer_arguments()
    if prefix in FREE_GROUPS:
        return value is None or isinstance(value, Mapping)
    if name == "_target_":
        return True
    # A class may take any other key. A name close to a listed one, such as rooot, is misspelt.
    is_misspelt = difflib.get_close_matches(name, map(str, options), 1, cutoff=0.88)
    return "_target_" in parent and not is_misspelt
