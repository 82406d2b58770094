"""Find the config of the run that resume= names; config/compose.py merges the overrides into it."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.config.compose import compose, plain
from lockstep.config.foreign import OF_RUN, accepted
from lockstep.config.schema import key_of
from lockstep.launch.launchers import is_first_on_node, is_started_rank, named_run
from lockstep.runs.config import Config
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, read_config

log = logging.getLogger(__name__)

FINDERS = ("resume", "run_id", "sweep_dir", "paths", "s3", "hydra")  # keys that say where the run is
RANKS = ("trainer.devices", "trainer.num_nodes")  # a launcher that starts the ranks says how many there are


def find_stored(overrides: list[str]) -> Config | None:
    """Return the config of the run to resume; None for a new run, or on a node that does not have it.

    A run that only its bucket knows is fetched first.

    Raises:
        UserError: the bucket cannot be used, or its config names what is not here.
    """
    if not any(key_of(word) == "resume" for word in overrides):
        return None
    config = plain(compose("train", [word for word in overrides if key_of(word).partition(".")[0] in FINDERS]))
    environ = environment()
    folder = _folder_of_run(config, environ) if config["resume"] else None
    before = config_before(folder) if folder else None
    if folder is None or before is None:
        return None
    if not folder.config.exists():  # it came from the bucket
        before, rejected = accepted(before, OF_RUN, f"The config of the run {folder.run_id} in its bucket")
        named = {key_of(word) for word in overrides}
        if (left := [key for key in rejected if key not in named]) and is_first_on_node(environ):
            log.info(f"Not taken from the bucket's config, give them again to have them: {', '.join(left)}")
    if is_started_rank(environ):
        words = [word for word in before.get("overrides") or () if key_of(str(word)) not in RANKS]
        before = {**before, "overrides": words}
    return before


def _folder_of_run(config: Config, environ: Mapping[str, str]) -> RunFolder | None:
    logs, resume = Path(config["paths"]["log_dir"]), config["resume"]
    if resume != "auto":
        try:
            return find_run(logs, resume)
        except UserError:  # another node may have it; the launch names the run that is missing
            return RunFolder(runs_folder(config, logs) / checked_run_id(resume))
    if not (named := named_run(config, environ)):
        return None
    folder = RunFolder(runs_folder(config, logs) / checked_run_id(named))
    if (config.get("s3") or {}).get("uri"):
        _fetch(config, folder, first=is_first_on_node(environ))
    return folder


def config_before(folder: RunFolder) -> dict[str, Any] | None:
    """Return the config that the run was last started with, from its folder or its bucket.

    Raises:
        UserError: it is no run's config.
    """
    path = folder.config if folder.config.exists() else folder.bucket_config
    if not path.exists():
        return None
    config = read_config(path)
    if not all(isinstance(config.get(part), Mapping) for part in ("data", "model", "trainer")):
        raise UserError(f"{path} is no config of a run.")
    return config


def _fetch(config: Config, folder: RunFolder, *, first: bool) -> None:
    """Fetch the run from its bucket; the ranks of a node ask one after the other, and the later ones find it there."""
    from lockstep.storage.fetch import fetch_run
    from lockstep.storage.s3 import Bucket

    if not first:
        logging.getLogger("lockstep.storage").setLevel(logging.WARNING)  # the first rank of the node logs it
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"):
        fetch_run(Bucket.of(config["s3"]).at(folder.run_id), folder)


def runs_folder(config: Config, logs: Path) -> Path:
    """Return the folder that holds the folders of runs."""
    return Path(config["sweep_dir"]) if config.get("sweep_dir") else logs / config["task_name"] / "runs"
