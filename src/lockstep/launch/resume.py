"""A run that goes on has the options that it was started with; what the command line says beside resume= wins."""

import logging
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from lockstep.config.compose import CONFIGS, compose, plain
from lockstep.distributed import cluster as world
from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, read_config
from lockstep.runs.output import only_warnings

log = logging.getLogger(__name__)

# The run is found by these; where it was found, it goes on.
NOT_KEPT = ("resume", "run_id", "sweep_dir", "paths.log_dir")
FINDERS = (*NOT_KEPT, "paths", "s3")
# A launcher that starts the ranks says how many there are, and another trainer may have other devices.
OF_THE_WORLD = ("trainer.devices", "trainer.num_nodes")
# What a bucket, to which others may write, cannot decide: where this machine reads and writes, and whom it talks to.
PLACES = (
    "paths", "s3", "data.root", "data.cache_dir", "data.download_dir", "ckpt_path", "model.weights", "logger",
    "trainer.initial_peers", "callbacks.spot.address",
)  # fmt: skip


def with_options_of_run(words: list[str]) -> list[str]:
    """The command line's overrides, for resume= behind the run's own that they do not name.

    A run that only its bucket knows is fetched first. A node that never had the run goes by the command line alone.

    Raises:
        UserError: the bucket cannot be used.
    """
    if not any(_key(word) == "resume" for word in words):
        return words
    environment = world.environment()
    finders = [word for word in words if _is_below(_key(word), FINDERS)]
    config = plain(compose("train", finders))
    if not config["resume"]:
        return words
    path = _config_of_run(config, environment)
    if path is None:
        return words
    dropped = NOT_KEPT if world.launched_alone(environment) else (*NOT_KEPT, *OF_THE_WORLD)
    before = [word for word in _stated(path) if _key(word) not in dropped]
    mistrusted = [word for word in before if not _is_harmless(word)] if _has_bucket(config) else []
    before = [word for word in before if word not in mistrusted]
    kept = kept_words(before, words)
    if world.first_on_node(environment):
        if kept:
            log.info(f"The run's own options: {' '.join(kept)}")
        if left := [word for word in mistrusted if _key(word) not in {_key(own) for own in words}]:
            log.info(f"Not taken from the bucket, give them again if you want them: {' '.join(left)}")
    return [*kept, *words]


def kept_words(before: list[str], now: list[str]) -> list[str]:
    """Of a run's overrides those that `now` does not name; a group named anew forgets keys that it lacks."""
    named = {_key(word) for word in now if not word.startswith("~")}
    deleted = {_key(word) for word in now if word.startswith("~")}  # what the run's own words made is there to delete
    groups = {key for key in named if (CONFIGS / key).is_dir()}
    if "trainer" in named:
        named |= {*OF_THE_WORLD, "trainer.accelerator"}
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


def _is_harmless(word: str) -> bool:
    """A value of a key that the configs have: nothing that builds, deletes, or reads the environment."""
    return not (word.startswith(("+", "~")) or "{" in word or "$" in word or _is_below(_key(word), PLACES))


def _has(cfg: Any, key: str) -> bool:
    *parents, last = key.split(".")
    for parent in parents:
        cfg = cfg.get(parent) if hasattr(cfg, "get") else None
    return hasattr(cfg, "keys") and last in cfg


def _stated(path: Path) -> list[str]:
    words = read_config(path).get("overrides")
    words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    return [word for word in words if not _key(word).startswith("hydra")]


def _has_bucket(config: dict[str, Any]) -> bool:
    return config["resume"] == "auto" and bool((config.get("s3") or {}).get("uri"))


def _config_of_run(config: dict[str, Any], environment: dict[str, str]) -> Path | None:
    logs, resume = Path(config["paths"]["log_dir"]), config["resume"]
    if resume == "auto":
        named = config.get("run_id") or world.outside_run_id(environment)
        if not named:
            return None
        folder = RunFolder(runs_folder(config, logs) / checked_run_id(named))
        if _has_bucket(config):
            _fetch(config, folder, first=world.first_on_node(environment))
    else:
        try:
            folder = find_run(logs, resume)
        except UserError:  # a node that has no record, or none of the run; what looks for the folder says so
            folder = RunFolder(runs_folder(config, logs) / checked_run_id(resume))
    return folder.any_config()


def _fetch(config: dict[str, Any], folder: RunFolder, *, first: bool) -> None:
    """Every rank that a launcher started asks, one after the other; the later ones find it there."""
    from lockstep.storage.bucket import open_store
    from lockstep.storage.fetch import fetch_run

    said_once = nullcontext() if first else only_warnings("lockstep.storage")
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"), said_once:
        fetch_run(open_store(config["s3"]), folder)


def runs_folder(config: dict[str, Any], logs: Path) -> Path:
    return Path(config["sweep_dir"]) if config.get("sweep_dir") else logs / config["task_name"] / "runs"
