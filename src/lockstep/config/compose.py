"""Compose the config of a run from the command line with Hydra. Imports no torch, so that --help answers at once."""

import functools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config import merge
from lockstep.config.check import check
from lockstep.config.class_source import has_method
from lockstep.config.schema import FREE_GROUPS, is_group, key_of, trainer_arguments
from lockstep.config.suggestions import missing_option, unknown_key
from lockstep.process.errors import UserError
from lockstep.process.project import REPOSITORY
from lockstep.process.redact import redact_text
from lockstep.records.config import Config
from lockstep.records.folder import new_run_id

CONFIGS = REPOSITORY / "configs"
NOT_CHOSEN = ("hydra", "fits", "resumed")  # groups whose options nobody chooses
# Values that are names: `run_id=2025_11_25` is not a number.
TEXT = re.compile(
    r"\+*(run_id|resume|ckpt_path|experiment_name|tags|sweep_dir|optimized_metric|paths\.\w+|s3\.(uri|endpoint_url)"
    r"|data\.(name|group|root|images|cache_dir)|model\.(name|weights)|hydra\.(sweeper\.study|sweep\.dir))"
)
UNFIT = {"data._target_": ("data", "task"), "model._target_": ("data", "task", "optimizer", "scheduler")}
OPTIONAL_KEYS = ("_target_", "_partial_", "monitor", "mode", "outputs")  # keys that an option has, whatever its class
# Values that Hydra reads as they are meant: functions of its grammar, quotes, lists, sweeps, null and plain text
READ = re.compile(
    r"""(?as)(choice|range|interval|glob|tag|sort|shuffle|str)\(.*\)|['"$\[].*|.*,.*|(?i:null)"""
    r"|(?!(?i:true|false|nan|inf)$)[a-zA-Z/][\w/.:@-]*"
)


@dataclass(frozen=True)
class CommandLine:
    """The overrides of a command line, as Hydra reads them.

    Args:
        config_name: the yaml that Hydra composes.
        words: the overrides.
        folders: the folders that hold the groups, configs/ first.
    """

    config_name: str
    words: list[str]
    folders: tuple[Path, ...]

    @classmethod
    def parse(cls, config_name: str, overrides: list[str]) -> "CommandLine":
        """Quote names; refuse an override without key or value, and an option that is missing."""
        folders = _config_folders(overrides)
        words = []
        for override in overrides:
            is_option = is_choice(override, folders)
            words.append(as_typed(override.lstrip("+") if is_option else override))
        for word in words:
            _check_form(word, folders)
        return cls(config_name, words, folders)

    @property
    def choices(self) -> dict[str, str]:
        """The options that are chosen, by group."""
        chosen = [word for word in self.words if is_choice(word, self.folders)]
        return {key_of(word): word.partition("=")[2] for word in chosen}

    @property
    def search(self) -> list[str]:
        """The overrides that add folders of yamls."""
        return [word for word in self.words if word.startswith("hydra.searchpath=")]

    @property
    def without_fits(self) -> list[str]:
        """Overrides that remove what fits the chosen options: a class may be another one."""
        groups = {group for word in self.words for group in UNFIT.get(key_of(word), ())}
        return sorted(f"~fits/{group}" for group in groups)

    @property
    def recorded(self) -> list[str]:
        """The overrides that a run records: all but Hydra's own."""
        return [word for word in self.words if not re.match("hydra[./]", key_of(word))]


def compose(config_name: str, overrides: list[str], stored: Config | None = None) -> Any:
    """Compose a DictConfig with Hydra's own node (`hydra.runtime.choices` holds the chosen options).

    Args:
        stored: the config of a run. Its options and values count, then the overrides. A group for
            which the overrides choose another option is composed anew. For another experiment all is.

    Raises:
        UserError: a misspelt group, option or key, a key that nothing reads, or a value of the wrong type.
    """
    register_resolvers()
    line = CommandLine.parse(config_name, overrides)
    if stored and _keeps_experiment(line, stored):
        cfg, before = _compose_resumed(line, stored)
    else:
        before = []
        overrides_of_run = [*line.words, *line.without_fits]
        cfg = _compose(config_name, overrides_of_run, line.folders)
        if _brings_loaders(cfg, line):
            cfg = _compose(config_name, [*overrides_of_run, "data=none"], line.folders)

    cfg.hydra.overrides.task = [*before, *line.recorded]
    if line.words or stored:
        _check(cfg, line)
    return cfg


def _brings_loaders(cfg: Any, line: CommandLine) -> bool:
    """Return whether nobody has chosen data, and the module of task= has its own loaders."""
    if any(key_of(word).partition(".")[0] == "data" for word in line.words):
        return False
    recipe = line.choices.get("experiment")
    for folder in line.folders:
        yaml = folder / "experiment" / f"{recipe}.yaml"
        is_about_data = re.compile(r"^(\s*- override /?data:|data:)", re.MULTILINE)
        if yaml.is_file() and is_about_data.search(yaml.read_text()):
            return False
    return has_method(str(cfg.task.get("_target_")), "train_dataloader")


def _keeps_experiment(line: CommandLine, stored: Config) -> bool:
    recipe = (stored.get("choices") or {}).get("experiment")
    return line.choices.get("experiment", recipe) == recipe


def _compose_resumed(line: CommandLine, stored: Config) -> tuple[Any, list[str]]:
    """Compose the config of a run that goes on; return it with its overrides that still count."""
    choices = line.choices
    options = merge.options_of(stored, choices, line.folders)
    chosen_now = [word for word in line.words if key_of(word) in choices]
    fresh = _compose(line.config_name, [*line.search, *options, *chosen_now], line.folders)
    defaults = unresolved(fresh)

    values = merge.values_of(stored, line.words, choices, defaults)
    changes = merge.repeatable(line.words, stored, values, defaults)
    words = [*options, merge.override_of_values(values), *changes, *line.without_fits]
    cfg = _compose(line.config_name, words, line.folders)
    return cfg, merge.overrides_of(stored, line.words, choices)


def _check(cfg: Any, line: CommandLine) -> None:
    """Refuse what nothing reads, and remove what the options say of classes that are not chosen."""
    named = {key: name for key, name in chosen_options(cfg).items() if name}
    chosen = [f"{key}={name}" for key, name in named.items() if key not in ("experiment", "debug")]
    options = _of_choices(line.config_name, (*line.search, *chosen, *line.without_fits))
    check(unresolved(cfg), unresolved(options), line.words, line.folders)
    _drop_options_of_another_class(cfg, options)


def _compose(config_name: str, words: list[str], folders: tuple[Path, ...]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    with initialize_config_dir(str(CONFIGS), job_name=config_name, version_base="1.3"):
        try:
            return hydra_compose(config_name, words, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError) as error:
            found = re.match(r"Could not (?:override|delete from config\.) '([\w./-]+)'", str(error))
            if not found:
                raise UserError(one_sentence(error)) from None
            key = found[1]
    if key.startswith("trainer.") and key.removeprefix("trainer.") in trainer_arguments():
        return _compose(config_name, [f"++{word}" if key_of(word) == key else word for word in words], folders)
    choices = [word for word in words if is_choice(word, folders) or word.startswith("hydra.searchpath")]
    raise UserError(unknown_key(key, unresolved(_compose(config_name, choices, folders)), folders))


def _drop_options_of_another_class(cfg: Any, options: Any) -> None:
    """Remove what the chosen option says of its class where task._target_=, data._target_= … name another one."""
    from omegaconf import open_dict

    typed = {key_of(word) for word in typed_overrides(cfg)}
    for group in ("task", "data", "model", "scheduler"):
        node, default = cfg[group], unresolved(options)[group]
        target = node.get("_target_") if node else None
        if not target or target == default.get("_target_"):
            continue

        values = unresolved(cfg)[group]
        with open_dict(cfg):
            for key in default.keys() - {*OPTIONAL_KEYS}:
                if f"{group}.{key}" not in typed and values.get(key) == default[key]:
                    node.pop(key, None)
            cfg.hydra.runtime.choices[group] = target.rpartition(".")[2]


@functools.cache
def _of_choices(config_name: str, words: tuple[str, ...]) -> Any:
    """Compose the chosen options alone, without the values of an experiment; the same for all jobs of a sweep."""
    return _compose(config_name, list(words), _config_folders(list(words)))


def defaults_of(config: Config) -> dict[str, Any]:
    """Return the config of a run's chosen options alone, with unresolved interpolations."""
    overrides = [str(word) for word in config.get("overrides") or ()]
    search = [word for word in overrides if key_of(word) == "hydra.searchpath"]
    folders = _config_folders(search)
    words = []
    for group, name in (config.get("choices") or {}).items():
        if not name or group in ("experiment", "debug") or not is_group(group, folders):
            continue
        if not missing_option(group, str(name), folders):
            words.append(f"{group}={name}")
    return unresolved(_of_choices("train", (*search, *words)))


def is_choice(word: str, folders: tuple[Path, ...]) -> bool:
    """Return whether an override chooses an option (`model=alexnet`) rather than sets a value."""
    return "=" in word and not word.startswith("~") and is_group(key_of(word), folders)


def _config_folders(words: list[str]) -> tuple[Path, ...]:
    found = "".join(word.partition("=")[2] for word in words if word.startswith("hydra.searchpath="))
    return (CONFIGS, *(Path(path.replace("\\'", "'")) for path in re.findall(r"file://(.*?)(?<!\\)'", found)))


def as_typed(word: str) -> str:
    """Quote a name that Hydra would read as a number, a switch or not at all, and expand ~ in it."""
    key, sign, value = word.partition("=")
    if not sign or not TEXT.fullmatch(key):
        return word
    if re.fullmatch(r"\[[^\"'\[{$]+\]", value):
        items = (item if READ.fullmatch(item) else quoted(item) for item in value[1:-1].split(","))
        return f"{key}=[{','.join(items)}]"
    value = str(Path(value).expanduser()) if value.startswith("~") else value
    return f"{key}={value if READ.fullmatch(value) else quoted(value)}"


def quoted(value: str) -> str:
    """Quote a text for Hydra's grammar."""
    text = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
    return f"'{text}'"


def _check_form(word: str, folders: tuple[Path, ...]) -> None:
    """Refuse an override without key or value, an option that is not there, and ~ before a whole group."""
    key, sign, value = word.lstrip("+~").partition("=")
    if word.startswith("~"):
        if "." not in key and key not in FREE_GROUPS:
            raise UserError(f"{word}: a run needs {key}. Give it another value, {key}=VALUE or {key}=none.")
    elif not sign or not key:
        groups = sorted({path.parent.name for folder in folders for path in folder.glob(f"*/{key}.yaml")})
        choices = [f"{group}={key}" for group in groups] or [f"{key or 'KEY'}=VALUE"]
        raise UserError(f"{word}: write {' or '.join(choices)}.")
    for name in value.strip("[]").split(",") if re.fullmatch(r"[\w./-]+|\[[\w.,-]+\]", value) else ():
        if name != "null" and (sentence := missing_option(key, name, folders)):
            raise UserError(sentence)


def one_sentence(error: Exception) -> str:
    """Return an error of Hydra, OmegaConf or YAML in one line, with what to write instead where that is known."""
    lines = f"{error}\n{error.__cause__ or ''}".partition("Config search path")[0].splitlines()
    text = " ".join(dict.fromkeys(line.strip() for line in lines if line.strip() and "See https" not in line))
    text = re.sub(r" ?(full_key:|object_type=|reference_type=)\S*", "", text).rstrip(".")
    if several := re.match(r"Ambiguous value for argument '(.*?)=(.*)' 1\. ", text):
        key, value = several.groups()
        ways = f"""'{key}="{value}"' is one text, '{key}=[{value}]' a list, and -m sweeps over them"""
        text = f"{key}={value} is several values: {ways}"
    elif type(error).__name__ == "OverrideParseException":
        key, _, value = str(getattr(error, "override", "")).partition("=")
        text = f"""{key}={value} cannot be read: quote the value, '{key}="{value}"'"""
    elif re.search(r"appears more than once|Multiple values for|^In '(?!hydra)", text):
        text += (
            ". A yaml chooses options in its `defaults`, by `- override /GROUP: NAME`; that of an experiment begins "
            "with `# @package _global_`"
        )
    return redact_text(f"{text}.")


def register_resolvers() -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY), replace=True)
    OmegaConf.register_new_resolver("product", lambda *numbers: math.prod(numbers), replace=True)
    # A value of the run is not known yet: it stays as it is written until the callbacks and loggers are built.
    OmegaConf.register_new_resolver("run", lambda name: f"${{run:{name}}}", replace=True)
    OmegaConf.register_new_resolver("new_run_id", new_run_id, replace=True, use_cache=True)


def without_hydra(cfg: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])


def unresolved(cfg: Any) -> dict[str, Any]:
    """Return the config without Hydra's node as plain dicts and lists, with interpolations as they are written."""
    return plain(cfg, resolve=False)


def plain(cfg: Any, *, resolve: bool = True) -> dict[str, Any]:
    """Return the config without Hydra's node as plain dicts and lists; a UserError names a broken interpolation."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found: Any = OmegaConf.to_container(without_hydra(cfg) if resolve else cfg, resolve=resolve)  # a copy is slow
        return {key: value for key, value in found.items() if key != "hydra"}
    except OmegaConfBaseException as error:
        raise UserError(one_sentence(error)) from None


def whole_config(cfg: Any) -> dict[str, Any]:
    """Return the plain config with `choices` (the option of each group) and `overrides` (of the command line)."""
    search = [word for word in cfg.hydra.overrides.hydra if word.startswith("hydra.searchpath=")]  # of --config-dir
    words = list(dict.fromkeys([*typed_overrides(cfg), *search]))
    return {**plain(cfg), "choices": chosen_options(cfg), "overrides": words}


def typed_overrides(cfg: Any) -> list[str]:
    """Return the overrides as they were typed: interpolations are of their key and not of Hydra's list."""
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(cfg.hydra.overrides.task, resolve=False)
    return found


def chosen_options(cfg: Any) -> Config:
    """Return the option of each config group."""
    return {key: name for key, name in cfg.hydra.runtime.choices.items() if key.partition("/")[0] not in NOT_CHOSEN}
