"""A run that goes on has the options that it was started with; what the command line says beside resume= wins."""

from pathlib import Path
from typing import Any

import cluster as world
from compose import CONFIGS, compose, plain
from errors import UserError
from run_files import RunFolder, checked_run_id, find_run, read_config

# The run is found by these; where it was found, it goes on.
NOT_KEPT = ("resume", "run_id", "sweep_dir", "paths.log_dir")
GIVEN_BY_LAUNCHER = ("trainer.devices", "trainer.num_nodes")  # torchrun and srun say how many ranks there are
# Where this machine reads and writes: nothing that came from a bucket says that.
PLACES = ("paths", "s3", "data.root", "data.cache_dir", "data.download_dir")


def with_options_of_run(cfg: Any, environment: dict[str, str]) -> Any:
    """The composed config, for resume= composed anew from the run's own overrides and those in `cfg`.

    A run that only its bucket knows is fetched first. A node that never had the run goes by the command line alone.

    Raises:
        UserError: the bucket cannot be used.
    """
    config = plain(cfg)
    if not config.get("resume"):
        return cfg
    path = _config_of_run(config, environment)
    if path is None:
        return cfg
    dropped = NOT_KEPT if world.launched_alone(environment) else (*NOT_KEPT, *GIVEN_BY_LAUNCHER)
    before = [word for word in _stated(path) if _key(word) not in dropped]
    if _has_bucket(config):
        before = [word for word in before if "${" not in word and not _is_place(_key(word))]
    own = list(cfg.hydra.overrides.task)
    kept = kept_words(before, own)
    if not kept:
        return cfg
    if world.first_on_node(environment):
        print(f"The run's own options: {' '.join(kept)}", flush=True)
    return compose("train", [*kept, *own])


def _stated(path: Path) -> list[str]:
    words = read_config(path).get("overrides")
    words = [word for word in words if isinstance(word, str)] if isinstance(words, list) else []
    return [word for word in words if not _key(word).startswith("hydra")]


def _is_place(key: str) -> bool:
    return any(key == place or key.startswith(f"{place}.") for place in PLACES)


def _has_bucket(config: dict[str, Any]) -> bool:
    return config["resume"] == "auto" and bool((config.get("s3") or {}).get("uri"))


def kept_words(before: list[str], now: list[str]) -> list[str]:
    """Of a run's overrides those that `now` does not name; a group named anew forgets keys that it lacks."""
    named = {_key(word) for word in now}
    groups = {key for key in named if (CONFIGS / key).is_dir()}
    fresh = compose("train", [word for word in now if _key(word) in groups]) if groups else None
    return [
        word
        for word in before
        if _key(word) not in named and (_key(word).split(".")[0] not in groups or _has(fresh, _key(word)))
    ]


def _key(word: str) -> str:
    return word.split("=")[0].lstrip("+~").split("@")[0]


def _has(cfg: Any, key: str) -> bool:
    *parents, last = key.split(".")
    for parent in parents:
        cfg = cfg.get(parent) if hasattr(cfg, "get") else None
    return hasattr(cfg, "keys") and last in cfg


def _config_of_run(config: dict[str, Any], environment: dict[str, str]) -> Path | None:
    logs, resume = Path(config["paths"]["log_dir"]), config["resume"]
    if resume == "auto":
        named = config.get("run_id") or world.outside_run_id(environment)
        if not named:
            return None
        folder = RunFolder(runs_folder(config, logs) / checked_run_id(named))
        if _has_bucket(config) and world.first_on_node(environment):
            from s3_client import options_from
            from storage import fetch_run

            fetch_run(options_from(config["s3"]), folder)
    else:
        try:
            folder = find_run(logs, resume)
        except UserError:  # a node that has no record, or none of the run; what looks for the folder says so
            folder = RunFolder(runs_folder(config, logs) / checked_run_id(resume))
    return folder.any_config()


def runs_folder(config: dict[str, Any], logs: Path) -> Path:
    return Path(config["sweep_dir"]) if config.get("sweep_dir") else logs / config["task_name"] / "runs"
