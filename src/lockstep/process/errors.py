"""Errors whose message is written for the user, a full disk among them, and the exit codes. Imports no torch."""

import errno
import shutil
import socket
from pathlib import Path

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_NOT_UPLOADED = 3  # training finished, but the best checkpoint never reached the bucket
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: a checkpoint was saved, starting again goes on


class UserError(Exception):
    """An error that the user can fix: one sentence, printed without a traceback; the script ends with exit code 2."""


class Interrupted(Exception):
    """Raised on every rank at the same step boundary once a stop was asked for and the checkpoint is complete."""

    agreed = False  # every rank raises it at this step
    elsewhere = False  # only ranks of other nodes were asked


class Diverged(Exception):
    """The loss or a weight became nan or inf; raised on every rank at the same step."""


class NoRoom(OSError):
    """The disk of a folder is full, or the user's quota of it; the message names the folder."""

    def __str__(self) -> str:
        return str(self.strerror)


def is_full(error: BaseException | None) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "(os error 28)" in str(error)  # of safetensors


def no_room(error: BaseException, folder: Path, mend: str = "free space there, then start again") -> NoRoom | None:
    """Return NoRoom if the error, or its cause, says that a disk is full: that of its file, else that of `folder`."""
    cause: BaseException | None = error
    while cause is not None and not is_full(cause):
        cause = cause.__cause__ or cause.__context__
    if cause is None or isinstance(cause, NoRoom):
        return cause
    named, room = getattr(cause, "filename2", None) or getattr(cause, "filename", None), ""
    place = Path(named).parent if isinstance(named, str) else folder
    if place.is_dir():
        usage = shutil.disk_usage(place)
        room = f" ({usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free on {socket.gethostname()})"
    return NoRoom(errno.ENOSPC, f"no room on {place}{room}: {mend}")
