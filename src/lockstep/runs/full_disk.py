"""A full disk in one sentence, which names the folder that has no room. Imports no torch."""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(OSError):
    """The disk of a folder is full, or the user's quota of it."""

    def __init__(self, sentence: str) -> None:
        super().__init__(errno.ENOSPC, sentence)

    def __str__(self) -> str:
        return str(self.strerror)


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


@contextmanager
def full_disk_named(folder: Path, mend: str = "free space there, then start again") -> Iterator[None]:
    """Raise NoRoom if the block fails because a disk is full.

    Args:
        folder: the folder that the block writes to, named if the error does not name a file.
    """
    try:
        yield
    except Exception as error:
        if full := no_room(error, folder, mend):
            raise full from None
        raise


def no_room(error: BaseException, folder: Path, mend: str = "free space there, then start again") -> NoRoom | None:
    """Return None unless the error, or what it was raised for, says that a disk is full."""
    cause: BaseException | None = error
    while cause is not None and not is_full(cause):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, NoRoom):
        return cause
    if not isinstance(cause, OSError):
        return None
    named = cause.filename2 or cause.filename
    place = Path(os.fsdecode(named)).parent if isinstance(named, str | bytes) else folder
    try:
        usage = shutil.disk_usage(place)
        room = f" ({usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free on {socket.gethostname()})"
    except OSError:
        room = ""
    return NoRoom(f"no room on {place}{room}: {mend}")
