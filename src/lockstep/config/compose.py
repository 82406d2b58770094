"""Compose the config of a run from the command line with Hydra.

Imports no torch, so that --help answers at once.
"""

import functools
import math
import re
import warnings
from pathlib import Path
from typing import Any

from lockstep.config import merge
from lockstep.config.check import check_config
from lockstep.config.class_source import has_method
from lockstep.config.hydra_versions import register_resolver, store_config, version_base
from lockstep.config.overrides import (
    SEARCH_PATH,
    CommandLine,
    config_folders,
    is_choice,
    search_paths,
    set_or_add,
)
from lockstep.config.schema import is_group, key_of, keys_in_yaml, trainer_arguments, yaml_files
from lockstep.config.suggestions import missing_option, unknown_key
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact_text
from lockstep.records.config import Config, flatten
from lockstep.records.folder import new_run_id

CONFIGS = REPOSITORY / "configs"
# Groups whose options nobody chooses.
UNCHOSEN_GROUPS = ("hydra", "fits", "resumed")
# Groups whose options set values of others.
VALUE_GROUPS = ("experiment", "debug")
# Keys that an option has, whatever its class.
OPTIONAL_KEYS = {"_target_", "_partial_", "monitor", "mode", "outputs"}
REFUSED_KEY = re.compile(
    r"Could not (override|(?P<is_removed>delete from config)\.|"
    r"append to config\. (?P<is_listed>An item is already at))"
    r" '(?P<key>[\w./-]+)'"
)


def compose(config_name: str, overrides: list[str], stored: Config | None = None) -> Any:
    """Compose a DictConfig with Hydra's own node.

    `hydra.runtime.choices` holds the chosen options.

    Args:
        stored: the config of a run. Its options and values count, then the overrides. A group for
            which the overrides choose another option is composed anew. For another experiment all
            is.

    Raises:
        UserError: a misspelt group, option or key, a key that nothing reads, or a value of the
            wrong type.
    """
    register_resolvers()
    command_line = CommandLine.parse(config_name, overrides, CONFIGS)
    recipe = ((stored or {}).get("choices") or {}).get("experiment")
    if stored and command_line.choices.get("experiment", recipe) == recipe:
        cfg = _compose_resumed(command_line, stored)
        overrides_before = merge.inherited_overrides(
            stored, command_line.overrides, command_line.choices
        )
    else:
        overrides_before = []
        overrides_of_run = [*command_line.overrides, *command_line.fit_removals]
        cfg = _compose(config_name, overrides_of_run, command_line.folders)
        if _brings_loaders(cfg, command_line):
            cfg = _compose(config_name, [*overrides_of_run, "data=none"], command_line.folders)

    cfg.hydra.overrides.task = [*overrides_before, *command_line.recorded_overrides]
    if command_line.overrides or stored:
        _check(cfg, command_line)
    return cfg


def _brings_loaders(cfg: Any, command_line: CommandLine) -> bool:
    """Return whether nobody has chosen data, and the module of task= has its own loaders."""
    if any(key_of(word).partition(".")[0] == "data" for word in command_line.overrides):
        return False
    recipe = command_line.choices.get("experiment")
    if recipe and _chooses_data(str(recipe), command_line.folders):
        return False
    return has_method(str(cfg.task.get("_target_")), "train_dataloader")


def _chooses_data(experiment: str, folders: tuple[Path, ...]) -> bool:
    """Return whether an experiment, or one that its defaults include, is about data."""
    paths = [folder / "experiment" / f"{experiment}.yaml" for folder in folders]
    return any(_is_about_data(path, folders) for path in paths if path.is_file())


def _is_about_data(path: Path, folders: tuple[Path, ...]) -> bool:
    import yaml

    content = yaml.safe_load(path.read_text()) or {}
    if "data" in content:
        return True
    for entry in content.get("defaults") or []:
        if isinstance(entry, dict):
            # Keys are `data`, `/data` and `override /data`.
            if any(key.split()[-1].lstrip("/") == "data" for key in entry):
                return True
        elif entry != "_self_" and _chooses_data(str(entry).rpartition("/")[2], folders):
            return True
    return False


def _compose_resumed(command_line: CommandLine, stored: Config) -> Any:
    """Compose the config of a run that goes on."""
    choices = command_line.choices
    options = merge.inherited_options(stored, choices, command_line.folders)
    chosen_now = [override for override in command_line.overrides if key_of(override) in choices]
    fresh = _compose(
        command_line.config_name,
        [*command_line.search_path_overrides, *options, *chosen_now],
        command_line.folders,
    )
    defaults = unresolved(fresh)

    values = merge.inherited_values(stored, command_line.overrides, choices, defaults)
    changes = merge.repeatable_overrides(command_line.overrides, stored, values, defaults)
    store_config(group="resumed", name="run", node=values, package="_global_")
    overrides = [*options, "+resumed=run", *changes, *command_line.fit_removals]
    return _compose(command_line.config_name, overrides, command_line.folders)


def _check(cfg: Any, command_line: CommandLine) -> None:
    """Refuse what nothing reads, and remove what options say of classes that are not chosen."""
    chosen = []
    for group, name in chosen_options(cfg).items():
        if name and group not in VALUE_GROUPS:
            chosen.append(f"{group}={name}")
    options = _compose_options(
        command_line.config_name,
        (*command_line.search_path_overrides, *chosen, *command_line.fit_removals),
    )
    check_config(unresolved(cfg), unresolved(options), command_line.overrides, command_line.folders)
    _drop_options_of_another_class(cfg, options)


def _compose(config_name: str, overrides: list[str], folders: tuple[Path, ...]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    with (
        initialize_config_dir(str(CONFIGS), job_name=config_name, **version_base()),
        warnings.catch_warnings(),
    ):
        # A resume stores options whose yaml it does not find; a later config may find the yaml.
        warnings.filterwarnings("ignore", r"\s*'.*' is validated against ConfigStore schema")
        try:
            return hydra_compose(config_name, overrides, return_hydra_config=True)
        except (
            HydraException,
            OmegaConfBaseException,
            YAMLError,
            ValueError,
            TypeError,
            AttributeError,
        ) as error:
            refused = REFUSED_KEY.match(str(error))
            if not refused:
                raise UserError(describe_error(error)) from None
            sentence = describe_error(error)

    key = refused["key"]
    repaired = _repair_overrides(overrides, key, folders)
    if repaired == overrides and is_group(key, folders):
        raise UserError(sentence)
    # A plus before a key that the chosen option lists does no harm: a class of the user's has it,
    # too. A key that no yaml lists may be of Lightning's Trainer. Values may be added to a group.
    if refused["is_listed"] or _is_trainer_argument(key) or is_group(key, folders):
        return _compose(config_name, repaired, folders)
    choices = [word for word in overrides if is_choice(word, folders)]
    options = unresolved(_compose(config_name, [*search_paths(overrides), *choices], folders))
    if refused["is_removed"] and key in flatten(options):
        return _compose(config_name, repaired, folders)
    raise UserError(unknown_key(key, options, folders))


def _repair_overrides(overrides: list[str], key: str, folders: tuple[Path, ...]) -> list[str]:
    """Return overrides of `key` that Hydra takes.

    It refuses to set a key that is new, to add one that is there, and to remove a null, which is
    left out. A group of the user's own is added.
    """
    repaired = []
    for override in overrides:
        if key_of(override) != key:
            repaired.append(override)
        elif is_choice(override, folders):
            is_listed = is_group(key, (CONFIGS,))
            repaired.append(override if is_listed else f"+{override.lstrip('+')}")
        elif not override.startswith("~"):
            repaired.append(set_or_add(override))
    return repaired


def _is_trainer_argument(key: str) -> bool:
    group, _, name = key.partition(".")
    return group == "trainer" and name in trainer_arguments()


def adapt_to_multirun(typed: list[str]) -> list[str]:
    """Return overrides that Hydra's own multirun takes where `compose` does."""
    folders = config_folders(typed, CONFIGS)
    listed: set[str] = set()
    for path in yaml_files("trainer", folders):
        listed |= {key.name for key in keys_in_yaml(path, "trainer", commented=False)}

    overrides = []
    for override in typed:
        key = key_of(override)
        is_new = is_group(key, folders) or (_is_trainer_argument(key) and key not in listed)
        if is_choice(override, folders):
            # Only a group of the user's own is new to the defaults.
            plus = "" if is_group(key, (CONFIGS,)) else "+"
            override = f"{plus}{override.lstrip('+')}"
        elif override.startswith("+") or (is_new and not override.startswith("~")):
            override = set_or_add(override)
        overrides.append(override)
    return overrides


def _drop_options_of_another_class(cfg: Any, options: Any) -> None:
    """Remove what an option says of its class where task._target_= and the like name another."""
    from omegaconf import open_dict

    typed = {key_of(override) for override in typed_overrides(cfg)}
    values_of = unresolved(cfg)
    defaults_of_group = unresolved(options)
    for group in ("task", "data", "model", "scheduler"):
        node = cfg[group]
        values = values_of[group]
        defaults = defaults_of_group[group]
        target = node.get("_target_") if node else None
        if not target or target == defaults.get("_target_"):
            continue

        with open_dict(cfg):
            for key in defaults.keys() - OPTIONAL_KEYS:
                if f"{group}.{key}" not in typed and values.get(key) == defaults[key]:
                    node.pop(key, None)
            cfg.hydra.runtime.choices[group] = target.rpartition(".")[2]


@functools.cache
def _compose_options(config_name: str, overrides: tuple[str, ...]) -> Any:
    """Compose the chosen options alone, without the values of an experiment.

    They are the same for all jobs of a sweep.
    """
    folders = config_folders(list(overrides), CONFIGS)
    return _compose(config_name, list(overrides), folders)


def defaults_of(config: Config) -> dict[str, Any]:
    """Return the config of a run's chosen options alone, with unresolved interpolations."""
    overrides = [str(override) for override in config.get("overrides") or ()]
    search = [override for override in overrides if key_of(override) == SEARCH_PATH]
    folders = config_folders(search, CONFIGS)
    choices = []
    for group, name in (config.get("choices") or {}).items():
        if not name or group in VALUE_GROUPS or not is_group(group, folders):
            continue
        if not missing_option(group, str(name), folders):
            choices.append(f"{group}={name}")
    return unresolved(_compose_options("train", (*search, *choices)))


def describe_error(error: Exception) -> str:
    """Return an error of Hydra, OmegaConf or YAML in one line, with what to write instead."""
    message = f"{error}\n{error.__cause__ or ''}".partition("Config search path")[0]
    lines = [line.strip() for line in message.splitlines() if "See https" not in line]
    text = " ".join(dict.fromkeys(filter(None, lines)))
    text = re.sub(r" ?(full_key:|object_type=|reference_type=)\S*", "", text).rstrip(".")
    if several := re.match(r"Ambiguous value for argument '(.*?)=(.*)' 1\. ", text):
        key, value = several.groups()
        text = (
            f"""{key}={value} is several values: '{key}="{value}"' is one text, """
            f"'{key}=[{value}]' a list, and -m sweeps over them"
        )
    elif type(error).__name__ == "OverrideParseException":
        key, _, value = str(getattr(error, "override", "")).partition("=")
        text = f"""{key}={value} cannot be read: quote the value, '{key}="{value}"'"""
    elif re.search(r"appears more than once|Multiple values for|^In '(?!hydra)", text):
        text += (
            ". A yaml chooses options in its `defaults`, by `- override /GROUP: NAME`; that of an "
            "experiment begins with `# @package _global_`"
        )
    return redact_text(f"{text}.")


def register_resolvers() -> None:
    register_resolver("repository", lambda: str(REPOSITORY))
    register_resolver("product", lambda *numbers: math.prod(numbers))
    # A value of the run stays as it is written until the callbacks and loggers are built.
    register_resolver("run", lambda name: f"${{run:{name}}}")
    register_resolver("new_run_id", new_run_id, use_cache=True)


def remove_hydra_node(cfg: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])


def unresolved(cfg: Any) -> dict[str, Any]:
    """Return the config as `plain` does, with interpolations as they are written."""
    return plain(cfg, resolve=False)


def plain(cfg: Any, *, resolve: bool = True) -> dict[str, Any]:
    """Return the config without Hydra's node as plain dicts and lists.

    Raises:
        UserError: an interpolation is broken.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if resolve:
        # Hydra's node cannot be resolved. The copy takes time.
        cfg = remove_hydra_node(cfg)
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=resolve)
    except OmegaConfBaseException as error:
        raise UserError(describe_error(error)) from None
    return {key: value for key, value in values.items() if key != "hydra"}


def whole_config(cfg: Any) -> dict[str, Any]:
    """Return the plain config with `choices` (the option of each group) and `overrides`."""
    # Those of --config-dir are among Hydra's own overrides.
    search = search_paths(cfg.hydra.overrides.hydra)
    overrides = list(dict.fromkeys([*typed_overrides(cfg), *search]))
    return {**plain(cfg), "choices": chosen_options(cfg), "overrides": overrides}


def typed_overrides(cfg: Any) -> list[str]:
    """Return the overrides as they were typed: interpolations are not resolved."""
    from omegaconf import OmegaConf

    overrides: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    return overrides


def chosen_options(cfg: Any) -> Config:
    """Return the option of each config group."""
    choices = cfg.hydra.runtime.choices.items()
    return {
        group: name for group, name in choices if group.partition("/")[0] not in UNCHOSEN_GROUPS
    }
