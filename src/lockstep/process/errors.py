"""Errors whose message is written for the user, a full disk among them, and the exit codes.

Imports no torch.
"""

import errno
import shutil
import socket
import sys
from pathlib import Path

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
# Training has finished, but the best checkpoint never reached the bucket.
EXIT_NOT_UPLOADED = 3
# EX_TEMPFAIL of sysexits.h: a checkpoint was saved, and another start resumes from it.
EXIT_INTERRUPTED = 75

# Every script imports this file before it needs more: Windows has no fcntl, no SIGUSR1 and no fork.
if sys.platform == "win32":
    print("error: Lockstep needs Linux: on Windows install and start it in WSL.", file=sys.stderr)
    sys.exit(EXIT_USER_ERROR)


class UserError(Exception):
    """An error that the user can fix: one sentence, printed without a traceback.

    The script ends with exit code 2.
    """


class Interrupted(Exception):
    """A stop that was asked for: raised on every rank at one step, once the checkpoint is complete.

    Attributes:
        is_agreed: every rank raises it at this step.
        is_of_other_nodes: only ranks of other nodes were asked to stop.
    """

    is_agreed = False
    is_of_other_nodes = False


class CommandEnded(Exception):
    """The command has ended with this exit code, and has already printed its result or error."""

    def __init__(self, exit_code: int = EXIT_OK) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Diverged(Exception):
    """The loss or a weight became nan or inf; raised on every rank at the same step."""


class DiskFullError(OSError):
    """The disk of a folder is full, or the user's quota of it; the message names the folder."""

    def __str__(self) -> str:
        return str(self.strerror)


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error says that a disk, or the user's quota of it, is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors raises an exception of its own, with the system's text.
    return "(os error 28)" in str(error)


def as_disk_full_error(
    error: BaseException, folder: Path, remedy: str = "free space there, then start again"
) -> DiskFullError | None:
    """Return DiskFullError if the error, or its cause, says that a disk is full; else None.

    Args:
        folder: the message names it if the error names no file.
    """
    cause = _full_disk_error(error)
    if cause is None or isinstance(cause, DiskFullError):
        return cause

    file_name = getattr(cause, "filename2", None) or getattr(cause, "filename", None)
    place = Path(file_name).parent if isinstance(file_name, str) else folder
    free_space = ""
    if place.is_dir():
        usage = shutil.disk_usage(place)
        free_mib = usage.free / 2**20
        total_mib = usage.total / 2**20
        free_space = f" ({free_mib:.0f} of {total_mib:.0f} MiB free on {socket.gethostname()})"
    return DiskFullError(errno.ENOSPC, f"no room on {place}{free_space}: {remedy}")


def _full_disk_error(error: BaseException) -> BaseException | None:
    cause: BaseException | None = error
    while cause is not None and not is_disk_full(cause):
        cause = cause.__cause__ or cause.__context__
    return cause
