"""A run that goes on has the options that it was started with; what the command line says beside resume= wins."""

import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS, FITS, chosen_options, compose, plain
from lockstep.config.from_outside import EXACT, OF_A_RUN, Taken, words_from
from lockstep.distributed.cluster import environment
from lockstep.distributed.launchers import launcher_of
from lockstep.launch.agree import named_run
from lockstep.logbook.folders import flatten
from lockstep.runs.batch import ACCUMULATION
from lockstep.runs.config import Config
from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, read_config
from lockstep.runs.foreign_files import read_yaml
from lockstep.runs.output import only_warnings
from lockstep.runs.own_config import own_config

log = logging.getLogger(__name__)

# The run is found by these; where it was found, it goes on.
FINDERS_ALONE = ("resume", "run_id", "sweep_dir", "paths.log_dir")
NOT_KEPT = (*FINDERS_ALONE, ACCUMULATION)  # which follows the number of ranks
DEFAULTED = ("data", "augmentation", "model", "loss", "optimizer", "scheduler")
FINDERS = (*FINDERS_ALONE, "paths", "s3")
# A launcher that starts the ranks says how many there are, and another trainer may have other devices.
HOW_MANY_RANKS = ("trainer.devices", "trainer.num_nodes")


def with_options_of_run(words: list[str]) -> list[str]:
    """The command line's overrides, for resume= behind the run's own that they do not name.

    A run that only its bucket knows is fetched first. A node that never had the run goes by the command line alone.

    Raises:
        UserError: the bucket cannot be used.
    """
    if not any(_key(word) == "resume" for word in words):
        return words
    environ = environment()
    launcher = launcher_of(environ)
    finders = [word for word in words if _is_below(_key(word), FINDERS)]
    config = plain(compose("train", finders))
    if not config["resume"]:
        return words
    folder = _folder_of_run(config, environ)
    if folder is None:
        return words
    before = _stated(folder, Path(config["paths"]["log_dir"]), words)
    dropped = (*NOT_KEPT, *HOW_MANY_RANKS) if launcher.starts_ranks else NOT_KEPT
    kept = kept_words([word for word in before.words if _key(word) not in dropped], words)
    if launcher.is_first_on_node(environ):
        if kept:
            log.info(f"The run's own options: {' '.join(kept)}")
        named = {_key(word) for word in words}
        if left := [key for key in before.left_out if key not in named]:
            log.info(f"Not taken from a config that is not from here, give them again to have them: {', '.join(left)}")
    return [*kept, *words]


def _stated(folder: RunFolder, logs: Path, words: list[str]) -> Taken:
    """What this machine's user gave the run; of a run that came from elsewhere, what counts of its config here.

    Args:
        words: of now; a model or loss that they choose is not looked at.
    """
    path = folder.any_config()
    if path and (own := own_config(path, logs)):
        said = [word for word in own.get("overrides") or () if isinstance(word, str)]
        typed = [word for word in said if not _key(word).startswith("hydra")]
        return Taken([*_defaults_of_then(folder, own, typed), *typed])
    before = config_before(folder)
    if before is None:
        return Taken()
    named = {_key(word) for word in words}
    roots = tuple(root for root in OF_A_RUN if root not in EXACT or root not in named)
    return words_from(before, roots, f"The config of the run {folder.run_id}, which is not from here,")


def _defaults_of_then(folder: RunFolder, own: Config, typed: list[str]) -> list[str]:
    """Words for what the run had by default where a start of today has other defaults.

    Args:
        own: the run's config.
        typed: what its user said.
    """
    then = read_config(folder.defaults).get("choices") if folder.defaults.exists() else None
    if then == chosen_options(compose("train", [])):
        return []
    named = {_key(word) for word in typed}
    today, choices = chosen_options(compose("train", typed)), own.get("choices") or {}
    groups = [group for group in DEFAULTED if group not in named and choices.get(group) not in (None, today[group])]
    words = [f"{group}={choices[group]}" for group in groups]
    here = flatten(plain(compose("train", [*words, *typed])))
    fitted = {key for path in (CONFIGS / FITS).rglob("*.yaml") for key in flatten(read_yaml(path))}
    for key, value in flatten(own).items():
        if key in fitted - named and key in here and value != here[key]:
            words.append(f"{key}={json.dumps(value)}")
    return words


def kept_words(before: list[str], now: list[str]) -> list[str]:
    """Of a run's overrides those that `now` does not name; a group named anew forgets keys that it lacks."""
    named = {_key(word) for word in now if not word.startswith("~")}
    deleted = {_key(word) for word in now if word.startswith("~")}  # what the run's own words made is there to delete
    groups = {key for key in named if (CONFIGS / key).is_dir()}
    if "trainer" in named:
        named |= {*HOW_MANY_RANKS, "trainer.accelerator"}
    fresh = compose("train", [word for word in now if _key(word) in groups]) if groups else None
    return [
        word
        for word in before
        if _key(word) not in (deleted if word.startswith("~") else named)
        and (_key(word).split(".")[0] not in groups or _has(fresh, _key(word)))
    ]


def _key(word: str) -> str:
    return word.split("=")[0].lstrip("+~").split("@")[0]


def _is_below(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in places)


def _has(cfg: Any, key: str) -> bool:
    *parents, last = key.split(".")
    for parent in parents:
        cfg = cfg.get(parent) if hasattr(cfg, "get") else None
    return hasattr(cfg, "keys") and last in cfg


def _has_bucket(config: Config) -> bool:
    return config["resume"] == "auto" and bool((config.get("s3") or {}).get("uri"))


def _folder_of_run(config: Config, environ: Mapping[str, str]) -> RunFolder | None:
    logs, resume = Path(config["paths"]["log_dir"]), config["resume"]
    if resume == "auto":
        named = named_run(config, environ)
        if not named:
            return None
        folder = RunFolder(runs_folder(config, logs) / checked_run_id(named))
        if _has_bucket(config):
            _fetch(config, folder, first=launcher_of(environ).is_first_on_node(environ))
        return folder
    try:
        return find_run(logs, resume)
    except UserError:  # a node that has no record, or none of the run; what looks for the folder says so
        return RunFolder(runs_folder(config, logs) / checked_run_id(resume))


def config_before(folder: RunFolder) -> Config | None:
    """The config that the run was last started with, here or as its bucket says: data, to compare and to choose from.

    Raises:
        UserError: it is no run's config.
    """
    path = folder.any_config() or folder.bucket_config
    if not path.exists():
        return None
    config = read_config(path)
    if not all(isinstance(config.get(part), Mapping) for part in ("data", "model", "trainer")):
        raise UserError(f"{path} is no config of a run.")
    return config


def _fetch(config: Config, folder: RunFolder, *, first: bool) -> None:
    """Every rank that a launcher started asks, one after the other; the later ones find it there."""
    from lockstep.storage.bucket import open_store
    from lockstep.storage.fetch import fetch_run

    said_once = nullcontext() if first else only_warnings("lockstep.storage")
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"), said_once:
        fetch_run(open_store(config["s3"]), folder)


def runs_folder(config: Config, logs: Path) -> Path:
    return Path(config["sweep_dir"]) if config.get("sweep_dir") else logs / config["task_name"] / "runs"
