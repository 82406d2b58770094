"""The folder of a run, its lock, and whether it is resumed: from what, and with which options."""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from lockstep.checkpoints.files import complete
from lockstep.config import keys
from lockstep.config.changes import Change, changes_of
from lockstep.config.compose import compose, defaults_of, plain
from lockstep.config.foreign import OF_RUN, accepted
from lockstep.config.schema import key_of
from lockstep.process.environment import environment
from lockstep.process.errors import UserError, is_full
from lockstep.process.files import lock, locked_file
from lockstep.ranks.find import agent_id, is_first_on_node, launcher_of, named_run
from lockstep.records.config import Config, seconds_of
from lockstep.records.folder import RunFolder, checked_run_id, find_run, new_run_id, read_config
from lockstep.records.record import RunRecord, has_trained, read_record
from lockstep.storage.errors import S3Error
from lockstep.storage.pointers import read_pointers, refuse_other_run
from lockstep.storage.s3 import Bucket

log = logging.getLogger(__name__)



def folder_of(config: Config, run_id: str) -> RunFolder:
    """Return the folder of a run of this id, which need not exist."""
    runs = Path(config["paths"]["log_dir"]) / config["task_name"] / "runs"
    return RunFolder((Path(config["sweep_dir"]) if config.get("sweep_dir") else runs) / checked_run_id(run_id))


def find_stored(overrides: list[str]) -> Config | None:
    """Return the config of the run to resume; None for a new run, or on a node that does not have it.

    The record of a run that only its bucket knows is fetched first, by one process of each node.
    """
    if not any(key_of(word) == "resume" for word in overrides):
        return None
    config = plain(compose("train", [word for word in overrides if keys.finds_run(key_of(word))]))
    environ, is_auto = environment(), config["resume"] == "auto"
    folder = _folder_to_resume(config, environ)
    if folder is None:
        return None

    if is_auto and (config.get("s3") or {}).get("uri"):
        _fetch(config, folder, environ)
    # A job script gives all options each time.
    # Those of an attempt that trained nothing may have been wrong.
    if is_auto and folder.config.exists() and not has_trained(folder):
        return None
    before = config_before(folder)
    if before and not folder.config.exists():
        before = _taken_from_bucket(before, overrides, folder, environ)
    if before and launcher_of(environ):
        words = [str(word) for word in before.get("overrides") or ()]
        before["overrides"] = [word for word in words if key_of(word) not in keys.RANK_COUNTS]
    return before


def _folder_to_resume(config: Config, environ: Mapping[str, str]) -> RunFolder | None:
    """Return the folder of the run that resume= names; None if there is none on this node."""
    run_id = named_run(config, environ) if config["resume"] == "auto" else config["resume"]
    if not run_id:
        return None
    try:
        if config["resume"] == "auto":
            return folder_of(config, run_id)
        return find_run(Path(config["paths"]["log_dir"]), run_id)
    except UserError:  # another node may have it; the launch names what is wrong with it
        return None


def _fetch(config: Config, folder: RunFolder, environ: Mapping[str, str]) -> None:
    """Fetch the record and config of a run that only its bucket knows, by one process of each node."""
    from lockstep.storage.fetch import fetch_record

    if not is_first_on_node(environ):
        # The first rank of the node logs it.
        logging.getLogger("lockstep.storage").setLevel(logging.WARNING)
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"):
        fetch_record(Bucket.of(config["s3"]).at(folder.run_id), folder)


def _taken_from_bucket(
    before: Config, overrides: list[str], folder: RunFolder, environ: Mapping[str, str]
) -> dict[str, Any]:
    """Return the part of a bucket's config that may be used; log what has to be given again.

    Nothing is taken for a group whose class the command line names, as with task._target_=.
    """
    typed = {key_of(word) for word in overrides}
    roots = tuple(root for root in OF_RUN if f"{root}._target_" not in typed)
    whose = f"The config of the run {folder.run_id} in its bucket"
    taken, rejected = accepted(before, roots, whose)
    left = [key for key in rejected if key not in typed]
    if left and is_first_on_node(environ):
        again = "give them again to have them"
        log.info(f"Not taken from the bucket's config, {again}: {', '.join(left)}")
    return taken


def fetch_newer_checkpoints(config: Config) -> None:
    """Fetch the checkpoints of resume=auto that the bucket has and this node has not."""
    run_id = named_run(config, environment())
    if config.get("resume") != "auto" or not run_id or not (config.get("s3") or {}).get("uri"):
        return
    from lockstep.storage.fetch import fetch_checkpoints

    folder = folder_of(config, run_id)
    with locked_file(folder.path.parent / f".{folder.run_id}.lock"):
        fetch_checkpoints(Bucket.of(config["s3"]).at(folder.run_id), folder)


def check_bucket(config: Config, folder: RunFolder) -> None:
    """Refuse a bucket that holds another run of this id, before anything is written or searched.

    A bucket that cannot be used is left to the upload callback, which knows whether it is required.
    """
    if config["task_name"] != "train" or not (config.get("s3") or {}).get("uri"):
        return
    run = Bucket.of(config["s3"]).at(folder.run_id)
    with contextlib.suppress(S3Error):
        refuse_other_run(run, read_pointers(run), folder)


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
        what, is_over = "epochs", 0 < (now["max_epochs"] or 0) <= (previous.epochs or 0)
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
    changes = changes_of(before, now, defaults_of)
    for change in changes:
        if not keys.may_resume_change(change.key):
            group, _, name = change.key.partition(".")
            raise UserError(
                f"The run {folder.run_id} was started with another {group} "
                f"({name or group} {change}): resume it with the same options, or start a new run "
                "with ckpt_path=."
            )
    # A module with several optimizers passes max_steps by itself.
    if any(change.key in keys.LENGTHS for change in changes):
        check_length(folder, now)
    log_changes(changes, now)


def check_length(folder: RunFolder, now: Config) -> None:
    """Refuse a length that the run's newest checkpoint has passed."""
    sidecars = [sidecar for _, sidecar in complete(folder.checkpoints) if not sidecar.weights_only]
    if not sidecars:
        return
    newest = sidecars[0]
    epochs = now["trainer"]["max_epochs"] or -1
    steps = now["trainer"]["max_steps"]
    if 0 < epochs <= newest.epoch:
        reached, option = f"epoch {newest.epoch + 1}", f"trainer.max_epochs={newest.epoch + 1}"
    elif 0 <= steps < newest.step:
        reached, option = f"step {newest.step}", f"trainer.max_steps={newest.step}"
    else:
        return
    raise UserError(
        f"The run {folder.run_id} is in {reached} already: give {option} or more to go on, "
        f"or start a new run with ckpt_path={folder.run_id}."
    )


def log_changes(changes: list[Change], now: Config) -> None:
    """Log what a resume changes, and how."""
    lengths = [change for change in changes if change.key in keys.LENGTHS]
    for change in lengths:
        note = ""
        if now.get("scheduler"):
            note = ": the learning rate's schedule is stretched over the new length, and may jump"
        log.info(f"{change.key} {change}{note}.")
    others = [f"{change.key} {change}" for change in changes if change not in lengths]
    if others:
        log.info(f"Changed from here on: {'; '.join(others)}.")


def run_folder(config: Config, run_id: str | None) -> tuple[RunFolder, bool]:
    """Return the folder of this run, not yet made, and whether the run is new.

    Args:
        run_id: None for a new one.
    """
    resume = config.get("resume")
    if resume and resume != "auto":
        folder = find_run(Path(config["paths"]["log_dir"]), resume)
    else:
        folder = folder_of(config, run_id or new_run_id())
    is_new, agent = not has_trained(folder), agent_id(environment())
    # torchrun's agent may have started its ranks again, or SLURM requeued the job
    if not (is_new or resume or (agent and read_record(folder.record).agent == agent)):
        raise UserError(
            f"The run {folder.run_id} exists already: resume={folder.run_id} continues it, "
            "another run_id= starts a new one."
        )
    return folder, is_new


def hold_run_lock(folder: RunFolder, wait_s: float = 330.0) -> IO[str]:
    """Lock the run for this process and return the file to keep open: a second one would remove its checkpoints.

    It waits for a process that is just ending, and for a lost machine, whose locks a network file system frees in a
    minute or two.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        handle = folder.alive.open("a")
    except OSError as error:
        if is_full(error):
            raise
        reason = f"{folder.path} cannot be written ({error.strerror})"
        raise UserError(f"{reason}: give another place with paths.log_dir=.") from None
    if lock(handle, wait_s=0):
        return handle
    log.info(f"The run {folder.run_id} is trained by another process: waiting for it to end …")
    if lock(handle, wait_s):
        return handle
    handle.close()
    raise UserError(
        f"The run {folder.run_id} is still trained by another process, on this machine or on one that shares "
        f"{folder.path.parent}: end it; where its machine is gone, remove {folder.alive}."
    )
