"""Resume a run: find it and the options that it had, and refuse what cannot change within a run."""

import contextlib
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lockstep.checkpoints.files import complete_checkpoints
from lockstep.config import keys
from lockstep.config.changes import Change, changes_of
from lockstep.config.compose import compose, defaults_of, plain
from lockstep.config.foreign import RUN_ROOTS, accept_config
from lockstep.config.schema import key_of
from lockstep.process.environment import environment
from lockstep.process.errors import UserError
from lockstep.process.files import locked_file
from lockstep.ranks.find import detect_launcher, find_requested_run_id, is_first_on_node
from lockstep.records.config import ABSENT, Config, lookup, parse_seconds
from lockstep.records.folder import RunFolder, find_run_folder, read_config
from lockstep.records.record import RunRecord, has_trained, read_record
from lockstep.runs.run_lock import folder_of_run_id
from lockstep.storage.errors import S3Error
from lockstep.storage.pointers import read_pointers, refuse_newer_checkpoints, refuse_other_run
from lockstep.storage.s3 import Bucket

log = logging.getLogger(__name__)

Limits = Mapping[str, Any]  # max_epochs, max_steps and max_time, as trainer= has them


def find_stored_config(overrides: list[str]) -> Config | None:
    """Return the config of the run to resume; None for a new run, or a node that lacks the run."""
    if "resume" not in map(key_of, overrides):
        return None
    environ = environment()
    folder = _find_folder_to_resume(overrides, environ)
    config = read_earlier_config(folder) if folder else None
    if folder is None or config is None:
        return None

    if not folder.config_path.exists():
        config = _accept_bucket_config(config, overrides, folder, environ)
    if detect_launcher(environ):
        config["overrides"] = _remove_rank_counts(config.get("overrides") or ())
    return config


def _find_folder_to_resume(overrides: list[str], environ: Mapping[str, str]) -> RunFolder | None:
    """Return the folder of the run whose stored options apply; None if there is none.

    If only the bucket has the run, its record is fetched first, by one process of each node.
    """
    locators = [override for override in overrides if keys.is_run_locator(key_of(override))]
    config = plain(compose("train", locators))
    folder = _find_named_folder(config, environ)
    if folder is None or config["resume"] != "auto":
        return folder

    if has_bucket(config):
        _fetch_record(config, folder, environ)
    # A job script gives all options at each start. A start that trained nothing may have had wrong
    # ones, so that its options do not apply.
    if folder.config_path.exists() and not has_trained(folder):
        return None
    return folder


def _remove_rank_counts(overrides: Iterable[Any]) -> list[str]:
    return [
        override for override in map(str, overrides) if key_of(override) not in keys.RANK_COUNTS
    ]


def _find_named_folder(config: Config, environ: Mapping[str, str]) -> RunFolder | None:
    """Return the folder of the run that resume= names; None if this node has no such run."""
    try:
        if config["resume"] != "auto":
            return find_run_folder(Path(config["paths"]["log_dir"]), config["resume"])
        run_id = find_requested_run_id(config, environ)
        return folder_of_run_id(config, run_id) if run_id else None
    except UserError:
        # Another node may have the run. If none has, this is refused when the run is opened.
        return None


def has_bucket(config: Config) -> bool:
    """Return whether the config names a bucket for the run."""
    return bool((config.get("s3") or {}).get("uri"))


def _fetch_record(config: Config, folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Fetch the record and the config of a run from its bucket, by one process of each node."""
    from lockstep.storage.fetch import fetch_record

    if not is_first_on_node(environ):
        # The first rank of the node logs the transfer.
        logging.getLogger("lockstep.storage").setLevel(logging.WARNING)
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"):
        fetch_record(Bucket.from_config(config["s3"]).joinpath(folder.run_id), folder)


def _accept_bucket_config(
    config: Config, overrides: list[str], folder: RunFolder, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the part of a bucket's config that may be used; log what has to be given again.

    A group whose class the command line names, as with task._target_=, takes nothing from it.
    """
    override_keys = {key_of(override) for override in overrides}
    roots = tuple(root for root in RUN_ROOTS if f"{root}._target_" not in override_keys)
    title = f"The config of the run {folder.run_id} in its bucket"
    values, rejected = accept_config(config, roots, title)
    missing = [key for key in rejected if key not in override_keys]
    if missing and is_first_on_node(environ):
        log.info(
            "This start does not use these options of the bucket's config; give them again to "
            f"have them: {', '.join(missing)}"
        )
    return values


def fetch_newer_checkpoints(config: Config) -> None:
    """Fetch the checkpoints of resume=auto that the bucket has and this node has not."""
    run_id = find_requested_run_id(config, environment())
    if config.get("resume") != "auto" or not run_id or not has_bucket(config):
        return
    from lockstep.storage.fetch import fetch_checkpoints

    folder = folder_of_run_id(config, run_id)
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"):
        fetch_checkpoints(Bucket.from_config(config["s3"]).joinpath(folder.run_id), folder)


def check_bucket(config: Config, folder: RunFolder) -> None:
    """Refuse a bucket whose content this run would overwrite, before anything is written.

    It holds another run of this id, or newer checkpoints of this run, from another machine. A
    bucket that cannot be used is left to the upload callback, which knows whether it is required.
    """
    if config["task_name"] != "train" or not has_bucket(config):
        return
    bucket = Bucket.from_config(config["s3"]).joinpath(folder.run_id)
    with contextlib.suppress(S3Error):
        pointers = read_pointers(bucket)
        refuse_other_run(bucket, pointers, folder)
        # resume=auto has fetched what is newer, or has logged why it goes on without.
        if config.get("resume") != "auto":
            refuse_newer_checkpoints(bucket, pointers, folder)


def read_earlier_config(folder: RunFolder) -> dict[str, Any] | None:
    """Return the config that the run was last started with, from its folder or its bucket."""
    path = folder.config_path if folder.config_path.exists() else folder.bucket_config_path
    return read_config(path) if path.exists() else None


def find_finished_run(config: Config) -> RunFolder | None:
    """Return the run of resume=auto if nothing is left to train.

    A job script may start it again and again.
    """
    run_id = find_requested_run_id(config, environment())
    if config.get("resume") != "auto" or not run_id or config["task_name"] != "train":
        return None
    folder = folder_of_run_id(config, run_id)
    earlier_config = read_earlier_config(folder)
    if earlier_config is None or not folder.record_path.exists():
        return None
    record = read_record(folder.record_path)
    return folder if find_reached_limit(config, earlier_config, record) else None


def find_reached_limit(config: Config, earlier_config: Config, record: RunRecord) -> str | None:
    """Return the limit that a finished run has reached: epochs, steps or time.

    None if the run has not finished, or this start asks for more.
    """
    if record.status != "finished":
        return None
    limits: Limits = config["trainer"]
    earlier_limits: Limits = earlier_config.get("trainer") or {}
    if record.ended_by == "max_time":
        return "time" if _has_reached("time", limits, record) else None

    unit = "steps" if record.steps == earlier_limits.get("max_steps") else "epochs"
    # A callback, as EarlyStopping, may have ended the run before its limits.
    names = ("max_epochs", "max_steps", "max_time")
    is_unchanged = all(limits.get(name) == earlier_limits.get(name) for name in names)
    is_unchanged &= _patience_of(config) == _patience_of(earlier_config)
    return unit if is_unchanged or _has_reached(unit, limits, record) else None


def _patience_of(config: Config) -> list[Any]:
    """Return the patience of each callback that has one."""
    nodes = (config.get("callbacks") or {}).values()
    return [node["patience"] for node in nodes if node and "patience" in node]


def _has_reached(unit: str, limits: Limits, record: RunRecord) -> bool:
    """Return whether a run has trained for its epochs, steps or time; False without that limit."""
    if unit == "time":
        max_time = limits["max_time"]
        trained_s = record.fit_seconds or 0
        return bool(max_time) and parse_seconds(max_time, "trainer.max_time") <= trained_s
    if unit == "steps":
        return 0 <= limits["max_steps"] <= (record.steps or 0)
    return 0 < (limits["max_epochs"] or 0) <= (record.epochs or 0)


def check_resumable(folder: RunFolder, config: Config, record: RunRecord) -> None:
    """Refuse to resume a run that is over, or with an option that cannot change within a run.

    Args:
        config: the config of this start, with the values that the run has.
        record: the one that the earlier start has left.
    """
    earlier_config = read_earlier_config(folder) or {}
    unit = find_reached_limit(config, earlier_config, record)
    if unit:
        raise UserError(
            f"The run {folder.run_id} is finished ({record.epochs} epochs): give more "
            f"trainer.max_{unit} to go on."
        )

    _refuse_other_weights(folder, earlier_config, config)
    _check_weights_of_net(folder, earlier_config, config)
    changes = changes_of(earlier_config, config, defaults_of)
    for change in changes:
        if not keys.may_resume_change(change.key):
            raise _changed_option_error(folder, change)
    # A module with several optimizers passes max_steps, and this alone is no reason to refuse.
    if any(change.key in keys.LENGTHS for change in changes):
        _check_length(folder, config)
    _log_changes(changes, config)


def _refuse_other_weights(folder: RunFolder, earlier_config: Config, config: Config) -> None:
    """Refuse other initial weights, which a run with its own checkpoints would never read."""
    address = config.get(keys.WEIGHTS_AT_START)
    if not address or address == earlier_config.get(keys.WEIGHTS_AT_START):
        return
    if any(complete_checkpoints(folder.checkpoints)):
        raise UserError(
            f"The run {folder.run_id} goes on from its own checkpoints, and "
            f"{keys.WEIGHTS_AT_START}={address} would have no effect: leave it out, or start a "
            "new run with it."
        )


def _check_weights_of_net(folder: RunFolder, earlier_config: Config, config: Config) -> None:
    """Log that another file of model.weights= is not read; refuse a file instead of none.

    A job script may name another path at each start, so another path is not refused. Weights that
    come or go are, because they also decide how images are normalised.
    """
    key = keys.WEIGHTS_OF_NET
    address = _read_option(config, key)
    earlier_address = _read_option(earlier_config, key)
    if address == earlier_address:
        return
    if address is None or earlier_address is None:
        raise _changed_option_error(folder, Change(key, earlier_address, address))
    log.info(f"{key}={address} is not read: a run goes on from its own weights.")


def _read_option(config: Config, key: str) -> Any:
    """Return an option's value; None if it is not given."""
    value = lookup(config, key)
    return None if value is ABSENT else value


def _changed_option_error(folder: RunFolder, change: Change) -> UserError:
    group, _, name = change.key.partition(".")
    return UserError(
        f"The run {folder.run_id} was started with another {group} ({name or group} {change}): "
        "resume it with the same options, or start a new run with ckpt_path=."
    )


def _check_length(folder: RunFolder, config: Config) -> None:
    """Refuse a length that the run's newest checkpoint has passed."""
    sidecars = [
        sidecar
        for _, sidecar in complete_checkpoints(folder.checkpoints)
        if not sidecar.weights_only
    ]
    if not sidecars:
        return
    newest = sidecars[0]
    epochs = config["trainer"]["max_epochs"] or -1
    steps = config["trainer"]["max_steps"]
    if 0 < epochs <= newest.epoch:
        reached = f"epoch {newest.epoch + 1}"
        option = f"trainer.max_epochs={newest.epoch + 1}"
    elif 0 <= steps < newest.step:
        reached = f"step {newest.step}"
        option = f"trainer.max_steps={newest.step}"
    else:
        return
    raise UserError(
        f"The run {folder.run_id} is in {reached} already: give {option} or more to go on, "
        f"or start a new run with ckpt_path={folder.run_id}."
    )


def _log_changes(changes: list[Change], config: Config) -> None:
    """Log what a resume changes, and how."""
    others = []
    for change in changes:
        if change.key not in keys.LENGTHS:
            others.append(f"{change.key} {change}")
            continue
        note = ""
        # A schedule of torch keeps its length. So may the task's own, where scheduler= is empty.
        target = str((config.get("scheduler") or {}).get("_target_", "torch."))
        if not target.startswith("torch."):
            note = ": a schedule of scheduler= is stretched over the new length, and may jump"
        log.info(f"{change.key} {change}{note}.")
    if others:
        log.info(f"Changed from here on: {'; '.join(others)}.")
