"""The run to resume: its folder, its config, whether it is over, and what may differ from its earlier start."""

import logging
from pathlib import Path
from typing import Any

from lockstep.config.compose import compose, plain
from lockstep.config.foreign import OF_RUN, accepted
from lockstep.config.schema import key_of
from lockstep.launch.launchers import is_first_on_node, launcher_of, named_run
from lockstep.runs.config import Config, flatten, seconds_of
from lockstep.runs.environment import environment
from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file
from lockstep.runs.folder import RunFolder, checked_run_id, find_run, read_config
from lockstep.runs.record import RunRecord, read_record

log = logging.getLogger(__name__)

FINDERS = ("resume", "run_id", "sweep_dir", "paths", "s3", "hydra")  # keys that say where the run is
RANKS = ("trainer.devices", "trainer.num_nodes")  # a launcher that starts the ranks says how many there are
COMPARED = ("data", "augmentation", "model", "loss", "metrics", "optimizer", "scheduler", "task", "classifier", "seed",
            "experiment_name")  # fmt: skip
# Options that may differ: data_hash tells what the data are, and config.yaml has the scaled learning rates.
MAY_DIFFER = {"data.root", "data.cache_dir", "data.eval_batch_size", "data.num_workers",
              "data.path", "optimizer.scale_lr_with_batch"}  # fmt: skip


def folder_of(config: Config, run_id: str) -> RunFolder:
    """Return the folder of a run of this id, which need not exist."""
    runs = Path(config["paths"]["log_dir"]) / config["task_name"] / "runs"
    return RunFolder((Path(config["sweep_dir"]) if config.get("sweep_dir") else runs) / checked_run_id(run_id))


def find_stored(overrides: list[str]) -> Config | None:
    """Return the config of the run to resume; None for a new run, or on a node that does not have it.

    A run that only its bucket knows is fetched first, by one process of each node.
    """
    if not any(key_of(word) == "resume" for word in overrides):
        return None
    config = plain(compose("train", [word for word in overrides if key_of(word).partition(".")[0] in FINDERS]))
    environ, is_auto = environment(), config["resume"] == "auto"
    run_id = named_run(config, environ) if is_auto else config["resume"]
    if not run_id:
        return None
    try:
        folder = folder_of(config, run_id) if is_auto else find_run(Path(config["paths"]["log_dir"]), run_id)
    except UserError:  # another node may have it; the launch names what is wrong with it
        return None
    if is_auto and (config.get("s3") or {}).get("uri"):
        from lockstep.storage.fetch import fetch_run
        from lockstep.storage.s3 import Bucket

        if not is_first_on_node(environ):
            logging.getLogger("lockstep.storage").setLevel(logging.WARNING)  # the first rank of the node logs it
        with locked_file(folder.path.parent / f".{folder.run_id}.lock"):
            fetch_run(Bucket.of(config["s3"]).at(folder.run_id), folder)
    # A job script gives all options each time: those of an attempt that trained nothing may have been wrong.
    before = None if is_auto and folder.config.exists() and not has_trained(folder) else config_before(folder)
    if before and not folder.config.exists():  # it came from the bucket
        before, rejected = accepted(before, OF_RUN, f"The config of the run {folder.run_id} in its bucket")
        left = [key for key in rejected if key not in map(key_of, overrides)]
        if left and is_first_on_node(environ):
            log.info(f"Not taken from the bucket's config, give them again to have them: {', '.join(left)}")
    if before and launcher_of(environ):
        before["overrides"] = [word for word in before.get("overrides") or () if key_of(str(word)) not in RANKS]
    return before


def has_trained(folder: RunFolder) -> bool:
    """Return whether a run has trained a step or finished: otherwise its id can be used again, with other options."""
    if any(folder.checkpoints.glob("*.ckpt")):
        return True
    record = read_record(folder.record) if folder.record.exists() else RunRecord()
    return bool(record.steps) or record.status == "finished"


def config_before(folder: RunFolder) -> dict[str, Any] | None:
    """Return the config that the run was last started with, from its folder or its bucket."""
    path = folder.config if folder.config.exists() else folder.bucket_config
    return read_config(path) if path.exists() else None


def finished_already(config: Config) -> RunFolder | None:
    """Return the run of resume=auto if nothing is left to train: a job script may start it again and again."""
    named = named_run(config, environment())
    if config.get("resume") != "auto" or not named or config["task_name"] != "train":
        return None
    folder = folder_of(config, named)
    before = config_before(folder) if folder.record.exists() else None
    return folder if before and what_is_over(config, before, read_record(folder.record)) else None


def what_is_over(config: Config, before: Config, previous: RunRecord) -> str | None:
    """Return epochs, steps or time if a run has finished, and this start asks for no more of them."""
    now, stored = config["trainer"], before.get("trainer") or {}
    if previous.ended_by == "max_time":
        what, allowed = "time", now["max_time"] and seconds_of(now["max_time"], "trainer.max_time")
        is_over = bool(allowed) and allowed <= (previous.fit_seconds or 0)
    elif previous.steps == stored.get("max_steps"):
        what, is_over = "steps", 0 <= now["max_steps"] <= (previous.steps or 0)
    else:
        what, is_over = "epochs", now["max_epochs"] <= (previous.epochs or 0)
    is_same = all(now.get(key) == stored.get(key) for key in ("max_epochs", "max_steps", "max_time"))
    is_over = is_over or (is_same and what != "time")  # also if a callback, as EarlyStopping, ended it
    return what if is_over and previous.status == "finished" else None


def check_resumable(folder: RunFolder, now: Config, previous: RunRecord) -> None:
    """Refuse to resume a run that is over, or with an option that cannot change within a run.

    Args:
        now: the config of this start, with the values that the run has.
    """
    before = config_before(folder) or {}
    if more := what_is_over(now, before, previous):
        raise UserError(
            f"The run {folder.run_id} is finished ({previous.epochs} epochs): give more trainer.max_{more} to go on."
        )
    longest = [(tree.get("trainer") or {}).get("max_epochs") for tree in (before, now)]
    if longest[0] != longest[1] and "_target_" in (now.get("scheduler") or {}):
        change = f"trainer.max_epochs was {longest[0]}, now {longest[1]}"
        log.info(f"{change}: the learning rate's schedule is stretched over the new length, and may jump.")
    was = flatten(before)
    for key, value in flatten(now).items():  # a key that another version lacks does not count
        group, _, name = key.partition(".")
        if group in COMPARED and key in was and was[key] != value and key not in MAY_DIFFER:
            raise UserError(
                f"The run {folder.run_id} was started with another {group} ({name or group} was {was[key]!r}, now "
                f"{value!r}): resume it with the same options, or start a new run with ckpt_path=."
            )
