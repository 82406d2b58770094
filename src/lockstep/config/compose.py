"""Compose the config of a run from the command line with Hydra. Imports no torch, so that --help answers at once."""

import functools
import math
import re
from pathlib import Path
from typing import Any

from lockstep.config import merge, schema
from lockstep.config.schema import FREE_GROUPS, key_of, missing_option, unknown_key
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.folder import new_run_id
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.redact import redact_text

CONFIGS = REPOSITORY / "configs"
HELP = "python src/train.py --help lists what there is"
MAY_LACK = (*FREE_GROUPS, "augmentation", "hydra", "loss", "model", "optimizer", "scheduler")  # after ~KEY
# Values that are names: `run_id=2025_11_25` is no number.
TEXT = re.compile(
    r"run_id|resume|ckpt_path|experiment_name|tags|sweep_dir|optimized_metric|paths\.\w+|s3\.(uri|endpoint_url)"
    r"|data\.(name|group|root|images|cache_dir|download_dir)|model\.(name|weights)|hydra\.(sweeper\.study|sweep\.dir)"
)
OPTIONAL_KEYS = ("monitor", "mode", "outputs")  # keys that any task has, whatever its class
OF_DEFAULTS = (
    "A yaml chooses options in its `defaults`, by `- override /GROUP: NAME`; that of an experiment begins with "
    "`# @package _global_`."
)
FUNCTION = re.compile(r"(choice|range|interval|glob|tag|sort|shuffle|str)\(.*\)")  # of Hydra's grammar


def compose(config_name: str, overrides: list[str], stored: Config | None = None) -> Any:
    """Compose a DictConfig with Hydra's own node (`hydra.runtime.choices` holds the chosen options).

    Args:
        stored: the config of a run. Its options and values count, then the overrides. A group for which the overrides
            choose another option is composed anew.
    Raises:
        UserError: a misspelt group, option or key, a key that nothing reads, or a value of the wrong type.
    """
    register_resolvers()
    folders = _config_folders(overrides)
    words = [as_typed(re.sub(r"^\++", "", word) if is_choice(word, folders) else word) for word in overrides]
    for word in words:
        _check_form(word, folders)
    named = {key_of(word): word.partition("=")[2] for word in words if is_choice(word, folders)}
    search = [word for word in words if word.startswith("hydra.searchpath=")]
    own: list[str] = []
    if stored and not merge.is_another_recipe(stored, named):
        own = merge.options_of(stored, named, folders)
        chosen = [word for word in words if key_of(word) in named]
        fresh = _compose(config_name, [*search, *own, *chosen], folders)
        own += merge.values_of(stored, named, unresolved(fresh))
    before = (stored.get("overrides") or ()) if own and stored else ()
    rest = [word for word in words if not (word.startswith("~") and word in before)]  # the run has removed it already
    cfg = _compose(config_name, [*own, *rest], folders)
    if own and stored:
        cfg.hydra.overrides.task = [*merge.overrides_of(stored, rest, named), *cfg.hydra.overrides.task[len(own) :]]
    if words or own:
        options = _of_choices(config_name, (*search, *_choices(cfg)))
        schema.check(unresolved(cfg), unresolved(options), words, folders)
        _drop_options_of_another_class(cfg, options)
    for word in words:
        if word.startswith("~") and (key := key_of(word)).partition(".")[0] not in MAY_LACK:
            raise UserError(f"{word}: a run needs {key}. Give it another value, {key}=VALUE.")
    names = {"run_id": cfg.run_id, "experiment_name": cfg.experiment_name, "data.name": cfg.data.get("name")}
    for key, name in names.items():
        if isinstance(name, bool | int | float):
            raise UserError(f"{key}={name} is read as a number. Quote it where it is written: '{name}'.")
    return cfg


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
            if not (found := re.match(r"Could not (?:override|delete from config\.) '([\w./-]+)'", str(error))):
                raise UserError(one_sentence(error, words, folders)) from None
            key = found[1]
    if key.partition(".")[0] == "trainer" and key.partition(".")[2] in schema.trainer_arguments():
        return _compose(config_name, [f"++{word}" if key_of(word) == key else word for word in words], folders)
    choices = [word for word in words if is_choice(word, folders) or word.startswith("hydra.searchpath")]
    raise UserError(unknown_key(key, unresolved(_compose(config_name, choices, folders)), folders))


def _drop_options_of_another_class(cfg: Any, options: Any) -> None:
    """Remove what the chosen option says of its class if task._target_= or data._target_= names another one."""
    from omegaconf import OmegaConf, open_dict

    typed = {key_of(word) for word in cfg.hydra.overrides.task}
    for group in ("task", "data"):
        target = cfg[group].get("_target_")
        if not target or target == options[group].get("_target_"):
            continue
        default: Any = OmegaConf.to_container(options[group])
        own: Any = OmegaConf.to_container(cfg[group])
        for key in default:
            if key not in ("_target_", *OPTIONAL_KEYS) and f"{group}.{key}" not in typed and own[key] == default[key]:
                with open_dict(cfg):
                    del cfg[group][key]
        with open_dict(cfg):
            cfg.hydra.runtime.choices[group] = target.rpartition(".")[2]


@functools.cache
def _of_choices(config_name: str, words: tuple[str, ...]) -> Any:
    """Compose the chosen options alone; the same for all jobs of a sweep."""
    return _compose(config_name, list(words), _config_folders(list(words)))


def _choices(cfg: Any) -> list[str]:
    """Return the overrides that choose the same options; an experiment and a debug option only give values."""
    chosen = cfg.hydra.runtime.choices.items()
    skipped = ("hydra", "experiment", "debug", "fits", "resumed")
    return [f"{key}={name}" for key, name in chosen if name and key.partition("/")[0] not in skipped]


def is_choice(word: str, folders: tuple[Path, ...]) -> bool:
    """Return whether an override chooses an option (`model=alexnet`) and is no value."""
    return "=" in word and not word.startswith("~") and any((folder / key_of(word)).is_dir() for folder in folders)


def _config_folders(words: list[str]) -> tuple[Path, ...]:
    found = "".join(word.partition("=")[2] for word in words if word.startswith("hydra.searchpath="))
    return (CONFIGS, *(Path(path.replace("\\'", "'")) for path in re.findall(r"file://(.*?)(?<!\\)'", found)))


def as_typed(word: str) -> str:
    """Quote a name that Hydra would read as a number, a switch or not at all, and expand ~ in it."""
    key, sign, value = word.partition("=")
    if not sign or not TEXT.fullmatch(key.lstrip("+")) or FUNCTION.fullmatch(value):
        return word
    if value.startswith("["):
        simple = value.endswith("]") and not re.search(r"[\"'\[{$]", value[1:])
        return f"{key}=[{','.join(map(_quoted, value[1:-1].split(',')))}]" if simple and value != "[]" else word
    return f"{key}={_quoted(str(Path(value).expanduser()) if value.startswith('~') else value)}"


def _quoted(value: str) -> str:
    if value.startswith(("'", '"', "$")) or "," in value:  # a comma may separate the values of a sweep
        return value
    override = parse(f"x={value}")
    return value if override and isinstance(override.value(), str | None) else quoted(value)


def parse(word: str) -> Any:
    """Return Hydra's reading of an override; None if it cannot be read."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def quoted(value: str) -> str:
    """Quote a text for Hydra's grammar."""
    text = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
    return f"'{text}'"


def _check_form(word: str, folders: tuple[Path, ...]) -> None:
    key, sign, value = word.lstrip("+").partition("=")
    if not key.strip(" ~"):
        raise UserError(f"{word!r} names no key: write key=value. {HELP}.")
    if not sign and not key.startswith("~"):
        groups = sorted({path.parent.name for folder in folders for path in folder.glob(f"*/{key}.yaml")})
        meant = " or ".join(f"{group}={key}" for group in groups) or f"{key}=VALUE"
        raise UserError(f"{word} has no {'key' if groups else 'value'}: write {meant}.")
    if key.startswith("~") and key[1:] not in FREE_GROUPS and any((folder / key[1:]).is_dir() for folder in folders):
        instead = "none" if any((folder / key[1:] / "none.yaml").exists() for folder in folders) else "NAME"
        raise UserError(f"{word}: choose another option instead, {key[1:]}={instead}.")
    for name in value[1:-1].split(",") if re.fullmatch(r"\[[\w.,-]+\]", value) else [value]:
        hint = missing_option(key, name, folders) if re.fullmatch(r"[\w./-]+", name) and name != "null" else None
        if hint:
            raise UserError(hint)


def one_sentence(error: Exception, words: list[str], folders: tuple[Path, ...]) -> str:
    """Return an error of Hydra, OmegaConf or YAML in one line that says what to write."""
    if mark := getattr(error, "problem_mark", None):
        problem = f"{getattr(error, 'problem', '')} in line {mark.line + 1}, column {mark.column + 1}"
        return redact_text(f"{mark.name} is no YAML: {problem}.")
    missing = str(getattr(error, "missing_cfg_file", None) or "").removesuffix(".yaml")
    group, _, option = missing.rpartition("/")
    if instead := missing_option(group, option, folders):
        return f"{instead} It is in the defaults of a yaml."
    lines = f"{error}\n{error.__cause__ or ''}".partition("Config search path")[0].splitlines()
    text = " ".join(dict.fromkeys(line.strip() for line in lines))
    if "/" in group or re.search(r"appears more than once|Multiple values for|In '[^']+': Could not override", text):
        return f"{text.rstrip('.')}. {OF_DEFAULTS}"
    if type(error).__name__ == "OverrideParseException" or "Ambiguous value" in text:
        word = next((word for word in words if not (read := parse(word)) or read.is_sweep_override()), "")
        key, _, value = word.partition("=")
        several = ", or sweep over its values with -m" if "Ambiguous" in text else ""
        return redact_text(f"""{word} cannot be read: quote the value, '{key}="{value}"'{several}.""")
    text = re.sub(r" ?(full_key:|object_type=|reference_type=)\S*", "", text)
    said = f" (from the overrides: {' '.join(words)})" if words else ""
    return redact_text(f"{text}{said}. {HELP}.")


def unresolved(cfg: Any) -> Config:
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(without_hydra(cfg))
    return found


def without_hydra(cfg: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({key: value for key, value in cfg.items_ex(resolve=False) if key != "hydra"})


def register_resolvers() -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY), replace=True)
    OmegaConf.register_new_resolver("product", lambda *numbers: math.prod(numbers), replace=True)
    OmegaConf.register_new_resolver("new_run_id", new_run_id, replace=True, use_cache=True)


def plain(cfg: Any) -> dict[str, Any]:
    """Return the config without Hydra's node, with every interpolation resolved, as plain dicts and lists.

    Raises:
        UserError: an interpolation leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found: Any = OmegaConf.to_container(without_hydra(cfg), resolve=True)
        return found
    except OmegaConfBaseException as error:
        raise UserError(one_sentence(error, [], (CONFIGS,))) from None


def chosen_options(cfg: Any) -> Config:
    """Return the option of each config group."""
    choices = cfg.hydra.runtime.choices.items()
    return {key: value for key, value in choices if key.partition("/")[0] not in ("hydra", "fits", "resumed")}
