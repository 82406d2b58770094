"""The command line → one composed config. Imports Hydra only, so that --help and --cfg job answer at once."""

import functools
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.config.declared import (
    OPEN,
    dashed,
    dotted,
    key_of,
    missing_option,
    refuse_undeclared,
    refuse_without_class,
    sentence,
)
from lockstep.config.hydra_errors import one_sentence, without_value
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.output import say, set_up
from lockstep.runs.provenance import REPOSITORY
from lockstep.runs.script import exit_code_of

CONFIGS = REPOSITORY / "configs"
MAY_LACK = ("augmentation", "callbacks", "hydra", "logger", "loss", "metrics", "model", "optimizer", "scheduler")
FITS = "fits"  # what an option takes beside another one: nobody chooses it


def compose(config_name: str, overrides: list[str]) -> Any:
    """The composed DictConfig with Hydra's own node (`hydra.runtime.choices` names the chosen options).

    Raises:
        UserError: a misspelt group, option or key, a key that nothing reads, or a value of the wrong form.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    register_resolvers()
    for word in overrides:
        _check_form(word)
    faults = (HydraException, OmegaConfBaseException, YAMLError, ValueError, TypeError, AttributeError, KeyError)
    with initialize_config_dir(str(CONFIGS), job_name=config_name, version_base="1.3"):
        try:
            cfg = hydra_compose(config_name, overrides, return_hydra_config=True)
        except faults as error:  # Hydra's own checks raise Python's errors too
            _explain(config_name, overrides, faults)
            raise UserError(one_sentence(error, overrides, CONFIGS)) from None
        options = _of_choices(config_name, tuple(_choices(cfg)), CONFIGS) if overrides else cfg
    refuse_undeclared(_unresolved(cfg), _unresolved(options), CONFIGS, overrides)
    refuse_without_class(_unresolved(cfg))
    for word in overrides:
        if word.startswith("~") and (key := key_of(word)).partition(".")[0] not in MAY_LACK:
            raise UserError(f"{word}: a run needs {key}: give it another value, {key}=VALUE.")
    check_types(cfg, options, overrides)
    return cfg


def _check_form(word: str) -> None:
    if re.match(r"\s*[+~]*\s*(=|$)", word):
        raise UserError(f"{word!r} names no key: write key=value; python src/train.py --help lists what there is.")
    if re.fullmatch(r"\w+", word) and (groups := [path.parent.name for path in CONFIGS.glob(f"*/{word}.yaml")]):
        raise UserError(f"{word} says not of what: write {' or '.join(f'{group}={word}' for group in sorted(groups))}.")
    key, _, value = word.lstrip("+").partition("=")
    if (
        word.startswith("~")
        and key[1:] in ("callbacks", "logger")
        or (key in ("callbacks", "logger") and value == "[]")
    ):
        raise UserError(f"{word} adds nothing to those of every run: callbacks=none leaves them out.")
    if word in ("~data", "~model", "~optimizer", "~scheduler"):
        way = "scheduler=none leaves it out" if word == "~scheduler" else "nothing trains without"
        raise UserError(f"{word}: {way}.")
    for name in value[1:-1].split(",") if re.fullmatch(r"\[[\w.,-]+\]", value) else [value]:
        if re.fullmatch(r"[\w.-]+", name) and (instead := missing_option(key, name, CONFIGS)):
            raise UserError(instead)


def _explain(config_name: str, overrides: list[str], faults: Any) -> None:
    """Hydra's advice for an unknown key is to put a plus in front of it, and then nothing reads it.

    Raises:
        UserError: an override's key that nothing reads.
    """
    from hydra import compose as hydra_compose
    from omegaconf import OmegaConf

    try:
        cfg = hydra_compose(config_name, [w for w in overrides if _is_choice(w)], return_hydra_config=True)
        options = hydra_compose(config_name, _choices(cfg))
    except faults:
        return
    known = _unresolved(options)
    for place, word in enumerate(overrides):
        key = key_of(word)
        if _is_choice(word) or key.startswith("hydra") or "@" in key:
            continue
        if word.startswith("~") and key not in set(dotted(_unresolved(cfg))):
            raise UserError(sentence(key, known, CONFIGS))
        named = OmegaConf.create({})
        is_node = key.partition(".")[0] not in OPEN or "{" in word
        OmegaConf.update(named, key, None if is_node else True, force_add=True)
        refuse_undeclared(_unresolved(named), known, CONFIGS)
        if not re.search("[=~]", word):
            raise UserError(without_value(overrides, place))


def _choices(cfg: Any) -> list[str]:
    """The words that choose the same options; an experiment and a debug option only give values."""
    values = ("hydra", "experiment", "debug", FITS)
    chosen = cfg.hydra.runtime.choices.items()
    return [f"{key}={name}" for key, name in chosen if name and key.partition("/")[0] not in values]


@functools.cache
def _of_choices(config_name: str, choices: tuple[str, ...], configs: Path) -> Any:
    """The options' own values, to compare with; the same for all jobs of a sweep."""
    from hydra import compose as hydra_compose

    return hydra_compose(config_name, list(choices))


def _unresolved(cfg: Any) -> Config:
    from omegaconf import OmegaConf

    found: Any = OmegaConf.to_container(_without_hydra(cfg))
    return found


def _without_hydra(cfg: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create({key: value for key, value in cfg.items_ex(resolve=False) if key != "hydra"})


def _is_choice(override: str) -> bool:
    """A group's option (`model=alexnet`), not a value."""
    return "=" in override and not override.startswith("~") and (CONFIGS / key_of(override)).is_dir()


WORDS = {
    "data.global_batch_size": ("max",),
    "trainer.devices": ("auto",),
    "trainer.num_nodes": ("auto",),
}  # words that stand where a number does


def check_types(cfg: Any, defaults: Any, overrides: list[str]) -> None:
    """A number that an override or an experiment gives anew stays a number, a switch a switch.

    Raises:
        UserError: names the key, its default and what was given.
    """
    from omegaconf import OmegaConf

    typed = [key_of(word) for word in overrides if "=" in word and not word.startswith("~") and not _is_choice(word)]
    for key in dict.fromkeys([*typed, *dotted(_unresolved(cfg))]) if overrides else ():
        if key.startswith("hydra"):
            continue
        before, now = OmegaConf.select(defaults, key), OmegaConf.select(cfg, key)
        if now is None or now == before or now in WORDS.get(key, ()):
            continue
        if isinstance(before, bool) and not isinstance(now, bool):
            raise UserError(f"{key}={now!r}: give true or false (the default is {before}).")
        number = int if isinstance(before, int) else int | float
        is_number = isinstance(before, int | float) and not isinstance(before, bool)
        if is_number and (isinstance(now, bool) or not isinstance(now, number)):
            kind = "a whole number" if isinstance(before, int) else "a number"
            raise UserError(f"{key}={now!r}: give {kind} (the default is {before}).")


def register_resolvers() -> None:
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("repository", lambda: str(REPOSITORY), replace=True)
    OmegaConf.register_new_resolver("product", lambda *numbers: math.prod(numbers), replace=True)


def run_script(
    config_name: str,
    argv: list[str],
    task: Callable[[Any], int],
    description: str,
    completed: Callable[[list[str]], list[str]] = list,
) -> int:
    """Compose what the command line says and hand it to `task`; returns the exit code.

    `--help` and `--cfg job` answer without the task; `-m`, `--info` and completion are Hydra's own.

    Args:
        completed: gives the overrides to compose for those on the command line.
    """
    set_up()
    if "--help" in argv or "-h" in argv:
        from lockstep.config.help import help_text

        say(help_text(CONFIGS, config_name, description))
        return 0
    if not [word for word in argv if word.startswith("-")]:
        return exit_code_of(lambda: task(compose(config_name, completed(argv))))
    return exit_code_of(lambda: _with_hydra(config_name, argv, task))


def _with_hydra(config_name: str, argv: list[str], task: Callable[[Any], int]) -> int:
    _check_for_hydra(config_name, argv)
    return _through_hydra(config_name, argv, task)


WITH_VALUE = ("--cfg", "-c", "--package", "-p", "--config-dir", "--experimental-rerun", "--info", "-i")
HYDRAS = re.compile(
    r"--?(h|help|hydra-help|version|cfg|c|resolve|package|p|run|r|multirun|m|shell-completion|sc|config-dir|cd"
    r"|experimental-rerun|info|i)(=.*)?"
)


def _check_for_hydra(config_name: str, argv: list[str]) -> None:
    """What Hydra itself will compose, before it does: every job of a sweep.

    Raises:
        UserError: an option of no program here, or what `compose` refuses.
    """
    for place, word in enumerate(argv):
        if word.startswith("-") and not HYDRAS.fullmatch(word):
            raise UserError(dashed(argv[place:], _unresolved(compose(config_name, [])), CONFIGS))
    words = [word for word in argv if not word.startswith("-") and ("=" in word or word.startswith("~"))]
    if {"-m", "--multirun"} & set(argv):
        from lockstep.config.sweep import first_jobs

        for job in first_jobs(words, CONFIGS):
            compose(config_name, job)
    elif {"-c", "--cfg"} & {word.partition("=")[0] for word in argv} and words:
        compose(config_name, words)


def _through_hydra(config_name: str, argv: list[str], task: Callable[[Any], int]) -> int:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict

    codes: list[int] = []
    program = str(Path(sys.argv[0]).resolve())

    def job(cfg):
        whole = OmegaConf.create(cfg)
        with open_dict(whole):
            whole.hydra = HydraConfig.get()
        if whole.hydra.mode.name == "MULTIRUN":
            from lockstep.config.sweep import run_job

            return run_job(whole, program)
        codes.append(task(whole))
        return None

    register_resolvers()
    sys.argv[1:] = _options_first(argv)
    hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=config_name)(job)()
    from lockstep.config.sweep import ExitCodes

    return max([*codes, ExitCodes.worst])


def _options_first(argv: list[str]) -> list[str]:
    """Hydra's argparse takes overrides in one block only: `a=1 -m b=2` would be an error."""
    options: list[str] = []
    overrides: list[str] = []
    for place, word in enumerate(argv):
        is_value = place > 0 and argv[place - 1] in WITH_VALUE and "=" not in word
        (options if word.startswith("-") or is_value else overrides).append(word)
    return [*options, "--", *overrides]


def plain(cfg: Any) -> dict[str, Any]:
    """The config without Hydra's node, every interpolation resolved, as plain dicts and lists.

    Raises:
        UserError: an interpolation that leads nowhere.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found: Any = OmegaConf.to_container(_without_hydra(cfg), resolve=True)
        return found
    except OmegaConfBaseException as error:
        raise UserError(one_sentence(error, [], CONFIGS)) from None


def chosen_options(cfg: Any) -> Config:
    """The option of each config group."""
    choices = cfg.hydra.runtime.choices.items()
    return {key: value for key, value in choices if key.partition("/")[0] not in ("hydra", FITS)}
