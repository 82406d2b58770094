"""The folder of a run, and the lock that one process holds on it."""

import logging
from pathlib import Path
from typing import IO

from lockstep.process.environment import environment
from lockstep.process.errors import UserError, is_disk_full
from lockstep.process.files import lock, locked_file
from lockstep.ranks.find import find_restart_id
from lockstep.records.config import Config
from lockstep.records.folder import RunFolder, find_run_folder, new_run_id, validate_run_id
from lockstep.records.record import has_trained, read_record

log = logging.getLogger(__name__)

# A process that is just ending takes seconds; a network file system frees the locks of a lost
# machine within a minute or two.
LOCK_WAIT_S = 330.0


def folder_of_run_id(config: Config, run_id: str) -> RunFolder:
    """Return the folder of a run of this id, which need not exist."""
    if config.get("sweep_dir"):
        runs = Path(config["sweep_dir"])
    else:
        runs = Path(config["paths"]["log_dir"]) / config["task_name"] / "runs"
    return RunFolder(runs / validate_run_id(run_id))


def choose_run_folder(config: Config, run_id: str | None) -> tuple[RunFolder, bool]:
    """Return the folder of this run, which need not exist, and whether the run is new.

    Args:
        run_id: None for a new one.

    Raises:
        UserError: there is a run of this id, and nobody asked to continue it.
    """
    resume = config.get("resume")
    if resume and resume != "auto":
        folder = find_run_folder(Path(config["paths"]["log_dir"]), resume)
    else:
        folder = folder_of_run_id(config, run_id or new_run_id())

    is_new = not has_trained(folder)
    if is_new or resume:
        return folder, is_new
    # torchrun may have started its ranks again, or SLURM requeued the job.
    agent = find_restart_id(environment())
    if agent is not None and read_record(folder.record_path).agent == agent:
        return folder, is_new
    raise UserError(
        f"The run {folder.run_id} exists already: resume={folder.run_id} continues it, "
        "another run_id= starts a new one."
    )


def hold_run_lock(folder: RunFolder, wait_s: float = LOCK_WAIT_S) -> IO[str]:
    """Lock the run for this process, and return the file to keep open.

    A second process would remove the checkpoints of the first one.

    Raises:
        UserError: the folder cannot be written, or another process holds the lock for too long.
    """
    handle = _open_lock(folder)
    if lock(handle, wait_s=0):
        return handle
    log.info(f"The run {folder.run_id} is trained by another process: waiting for it to end …")
    if lock(handle, wait_s):
        return handle
    handle.close()
    raise UserError(
        f"The run {folder.run_id} is still trained by another process, on this machine or on one "
        f"that shares {folder.path.parent}: end it or, if its machine is gone, "
        f"remove {folder.lock_path}."
    )


def is_alive(folder: RunFolder) -> bool:
    """Return whether a process trains the run."""
    if not folder.lock_path.exists():
        return False
    with locked_file(folder.lock_path, wait_s=0) as is_free:
        return not is_free


def _open_lock(folder: RunFolder) -> IO[str]:
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        return folder.lock_path.open("a")
    except OSError as error:
        if is_disk_full(error):
            raise
        reason = f"{folder.path} cannot be written ({error.strerror})"
        raise UserError(f"{reason}: give another place with paths.log_dir=.") from None
