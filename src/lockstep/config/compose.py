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
from lockstep.config.class_source import defines_in_source
from lockstep.config.hydra_versions import register_resolver, store_config, version_base
from lockstep.config.overrides import (
    SEARCH_PATH,
    CommandLine,
    config_folders,
    is_choice,
    search_paths,
    set_or_add,
)
from lockstep.config.schema import is_group, key_of, trainer_arguments
from lockstep.config.suggestions import keys_of_group, missing_option, unknown_key
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact_text
from lockstep.records.config import Config, flatten
from lockstep.records.folder import new_run_id

CONFIGS = REPOSITORY / "configs"
# Nobody chooses an option of these groups.
UNCHOSEN_GROUPS = ("hydra", "fits", "resumed")
# The options of these groups set values of other groups.
VALUE_GROUPS = ("experiment", "debug")
# An option has these keys whatever its class is.
OPTIONAL_KEYS = {"_target_", "_partial_", "monitor", "mode", "outputs"}
REFUSED_KEY = re.compile(
    r"Could not (?P<action>override|delete from config|append to config)"
    r"(\.|\. An item is already at)? '(?P<key>[\w./-]+)'"
)


class KeyRefused(UserError):
    """Hydra's refusal of an override for its form, as without the plus of a new key.

    Attributes:
        key: the key of the override.
        action: what Hydra could not do: "override" a key, "delete from config" a key that is
            missing or null, or "append to config" a key that exists.
    """

    def __init__(self, sentence: str, key: str, action: str) -> None:
        super().__init__(sentence)
        self.key = key
        self.action = action


def compose(config_name: str, overrides: list[str], stored: Config | None = None) -> Any:
    """Compose a DictConfig with Hydra's own node.

    `hydra.runtime.choices` holds the chosen options.

    Args:
        stored: the config of a run that is resumed. The overrides change its options and values.
            If they choose another option of a group, the group is composed anew. If they choose
            another experiment, the whole config is composed anew.

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
        cfg = _compose_with_repairs(config_name, overrides_of_run, command_line.folders)
        if _brings_loaders(cfg, command_line):
            overrides_of_run.append("data=none")
            cfg = _compose_with_repairs(config_name, overrides_of_run, command_line.folders)

    cfg.hydra.overrides.task = [*overrides_before, *command_line.recorded_overrides]
    if command_line.overrides or stored:
        options = _compose_chosen_options(cfg, command_line)
        check_config(
            unresolved(cfg), unresolved(options), command_line.overrides, command_line.folders
        )
        _drop_options_of_another_class(cfg, options)
    return cfg


def _brings_loaders(cfg: Any, command_line: CommandLine) -> bool:
    """Return whether the module of task= has its own loaders, and nothing chooses data."""
    if any(key_of(word).partition(".")[0] == "data" for word in command_line.overrides):
        return False
    recipe = command_line.choices.get("experiment")
    if recipe and _chooses_data(str(recipe), command_line.folders):
        return False
    return defines_in_source(str(cfg.task.get("_target_")), "train_dataloader")


def _chooses_data(experiment: str, folders: tuple[Path, ...]) -> bool:
    """Return whether an experiment, or one that its defaults include, sets data."""
    paths = [folder / "experiment" / f"{experiment}.yaml" for folder in folders]
    return any(_sets_data(path, folders) for path in paths if path.is_file())


def _sets_data(path: Path, folders: tuple[Path, ...]) -> bool:
    import yaml

    content = yaml.safe_load(path.read_text()) or {}
    if "data" in content:
        return True
    for entry in content.get("defaults") or []:
        if isinstance(entry, dict):
            # The key may be `data`, `/data` or `override /data`.
            if any(key.split()[-1].lstrip("/") == "data" for key in entry):
                return True
        elif entry != "_self_" and _chooses_data(str(entry).rpartition("/")[2], folders):
            return True
    return False


def _compose_resumed(command_line: CommandLine, stored: Config) -> Any:
    """Compose the config of a resumed run from its stored config and the overrides."""
    choices = command_line.choices
    options = merge.inherited_options(stored, choices, command_line.folders)
    chosen_now = [override for override in command_line.overrides if key_of(override) in choices]
    fresh = _compose_with_repairs(
        command_line.config_name,
        [*command_line.search_path_overrides, *options, *chosen_now],
        command_line.folders,
    )
    defaults = unresolved(fresh)

    values = merge.inherited_values(stored, command_line.overrides, choices, defaults)
    changes = merge.repeatable_overrides(command_line.overrides, stored, values, defaults)
    store_config(group="resumed", name="run", node=values, package="_global_")
    overrides = [*options, "+resumed=run", *changes, *command_line.fit_removals]
    return _compose_with_repairs(command_line.config_name, overrides, command_line.folders)


def _compose_chosen_options(cfg: Any, command_line: CommandLine) -> Any:
    """Compose the options that `cfg` chooses, without the values that overrides set."""
    chosen = []
    for group, name in chosen_options(cfg).items():
        if name and group not in VALUE_GROUPS:
            chosen.append(f"{group}={name}")
    return _compose_options(
        command_line.config_name,
        (*command_line.search_path_overrides, *chosen, *command_line.fit_removals),
    )


def _compose_with_repairs(config_name: str, overrides: list[str], folders: tuple[Path, ...]) -> Any:
    """Compose a config, and repair the overrides that Hydra refuses for their form."""
    while True:
        try:
            return _compose_once(config_name, overrides)
        except KeyRefused as refusal:
            _refuse_unknown_key(refusal, config_name, overrides, folders)
            repaired = _repair_overrides(overrides, refusal.key, folders)
            if repaired == overrides:
                raise
            overrides = repaired


def _compose_once(config_name: str, overrides: list[str]) -> Any:
    """Compose a config with Hydra.

    Raises:
        KeyRefused: an override may need another form.
        UserError: any other error of Hydra, OmegaConf or YAML.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    with (
        initialize_config_dir(str(CONFIGS), job_name=config_name, **version_base()),
        warnings.catch_warnings(),
    ):
        # A resumed run stores an option whose yaml is missing in Hydra's ConfigStore. Hydra warns
        # when a later config finds a yaml of that name.
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
            sentence = describe_error(error)
            refused = REFUSED_KEY.match(str(error))
            if refused:
                raise KeyRefused(sentence, **refused.groupdict()) from None
            raise UserError(sentence) from None


def _refuse_unknown_key(
    refusal: KeyRefused, config_name: str, overrides: list[str], folders: tuple[Path, ...]
) -> None:
    """Refuse a key that neither a yaml nor Lightning's Trainer has."""
    key = refusal.key
    # A key that exists, an argument of Lightning's Trainer and a group are no unknown keys.
    if refusal.action == "append to config" or _is_trainer_argument(key) or is_group(key, folders):
        return
    choices = [override for override in overrides if is_choice(override, folders)]
    overrides_of_options = [*search_paths(overrides), *choices]
    options = unresolved(_compose_with_repairs(config_name, overrides_of_options, folders))
    if not (refusal.action == "delete from config" and key in flatten(options)):
        raise UserError(unknown_key(key, options, folders)) from None


def _repair_overrides(overrides: list[str], key: str, folders: tuple[Path, ...]) -> list[str]:
    """Return the overrides with those of `key` in a form that Hydra takes.

    Hydra refuses to set a new key and to add one that exists: `++` does both. It also refuses to
    remove a key that is null, which needs no override.
    """
    repaired = []
    for override in overrides:
        if key_of(override) != key:
            repaired.append(override)
        elif is_choice(override, folders):
            repaired.append(_add_group_of_user(override))
        elif not override.startswith("~"):
            repaired.append(set_or_add(override))
    return repaired


def _add_group_of_user(choice: str) -> str:
    """Return the choice of an option, with a plus if the defaults cannot list its group."""
    plus = "" if is_group(key_of(choice), (CONFIGS,)) else "+"
    return f"{plus}{choice.lstrip('+')}"


def _is_trainer_argument(key: str) -> bool:
    group, _, name = key.partition(".")
    return group == "trainer" and name in trainer_arguments()


def adapt_to_multirun(typed: list[str]) -> list[str]:
    """Return the overrides in a form in which Hydra's own multirun takes what `compose` takes."""
    folders = config_folders(typed, CONFIGS)
    listed = keys_of_group("trainer", folders)
    overrides = []
    for override in typed:
        key = key_of(override)
        is_new = is_group(key, folders) or (_is_trainer_argument(key) and key not in listed)
        if is_choice(override, folders):
            override = _add_group_of_user(override)
        elif override.startswith("+") or (is_new and not override.startswith("~")):
            override = set_or_add(override)
        overrides.append(override)
    return overrides


def _drop_options_of_another_class(cfg: Any, options: Any) -> None:
    """Remove the keys of an option whose class another one replaces, as by task._target_=.

    `hydra.runtime.choices` then names the class in place of the option.
    """
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
    """Compose options alone, once for all jobs of a sweep that have the same ones."""
    folders = config_folders(list(overrides), CONFIGS)
    return _compose_with_repairs(config_name, list(overrides), folders)


def defaults_of(config: Config) -> dict[str, Any]:
    """Return the config of the options that a run chose, with unresolved interpolations."""
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
        # Hydra's node cannot be resolved. It is removed only here, because the copy takes time.
        cfg = remove_hydra_node(cfg)
    try:
        values: Any = OmegaConf.to_container(cfg, resolve=resolve)
    except OmegaConfBaseException as error:
        raise UserError(describe_error(error)) from None
    return {key: value for key, value in values.items() if key != "hydra"}


def whole_config(cfg: Any) -> dict[str, Any]:
    """Return the plain config with `choices` (the option of each group) and `overrides`."""
    # The folders of --config-dir are among Hydra's own overrides.
    search = search_paths(cfg.hydra.overrides.hydra)
    overrides = list(dict.fromkeys([*typed_overrides(cfg), *search]))
    return {**plain(cfg), "choices": chosen_options(cfg), "overrides": overrides}


def typed_overrides(cfg: Any) -> list[str]:
    """Return the overrides as they were typed, with unresolved interpolations."""
    from omegaconf import OmegaConf

    overrides: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    return overrides


def chosen_options(cfg: Any) -> Config:
    """Return the option of each config group."""
    choices = cfg.hydra.runtime.choices.items()
    return {
        group: name for group, name in choices if group.partition("/")[0] not in UNCHOSEN_GROUPS
    }
