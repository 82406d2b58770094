"""A full disk, in one sentence: which folder has no room. Imports no torch."""

import errno
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
RESERVE = ".room"
RESERVE_BYTES = 64 * 2**10  # the record and an error file of each rank


class NoRoom(OSError):
    """The disk of a folder is full, or the user's share of it: one sentence that says where, and what would help."""

    def __init__(self, sentence: str) -> None:
        super().__init__(errno.ENOSPC, sentence)

    def __str__(self) -> str:
        return str(self.strerror)


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


@contextmanager
def full_disk_named(folder: Path, mend: str = "free space there, then start again") -> Iterator[None]:
    """Raises NoRoom for whatever a full disk did to the block.

    Args:
        folder: where the block writes; named where the error does not say which file it was.
    """
    try:
        yield
    except BaseException as error:  # torch.distributed.checkpoint's is no Exception
        if full := no_room(error, folder, mend):
            raise full from None
        raise


def no_room(error: BaseException, folder: Path, mend: str = "free space there, then start again") -> NoRoom | None:
    """None where it was something else than a full disk."""
    for cause in _causes(error):
        if isinstance(cause, NoRoom):
            return cause
        if isinstance(cause, OSError) and cause.errno in FULL:
            return NoRoom(f"no room on {_place(cause, folder)}: {mend}")
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised for; torch.distributed.checkpoint keeps those of its ranks in `failures`."""
    seen: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or one in seen:
            continue
        seen.append(one)
        yield one
        left += [one.__cause__, one.__context__]
        failures = getattr(one, "failures", None)
        if isinstance(failures, dict):
            left += [failure[0] for failure in failures.values() if isinstance(failure, tuple)]


def _place(error: OSError, folder: Path) -> str:
    named = error.filename2 or error.filename
    place = Path(os.fsdecode(named)).parent if isinstance(named, str | bytes) else folder
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return str(place)
    return f"{place} ({usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB free on {socket.gethostname()})"


def reserve_room(folder: Path) -> None:
    """Keep a little of the disk, so that a run whose disk is full can still write how it ended."""
    path = folder / RESERVE
    with full_disk_named(folder), path.open("wb") as file:
        file.write(os.urandom(RESERVE_BYTES))  # what repeats takes no room on a disk that compresses


def use_reserve(folder: Path) -> None:
    (folder / RESERVE).unlink(missing_ok=True)
