"""A full disk, in one sentence: which folder has no room. Imports no torch."""

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(Exception):
    """The disk of a folder is full, or the user's share of it; says where, and what would help."""


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def no_room(error: BaseException, folder: Path) -> NoRoom | None:
    """What a full disk did to whoever raised `error`; None where it was something else.

    Args:
        folder: where the process writes most; named where the error does not say which file it was.
    """
    for cause in _causes(error):
        if isinstance(cause, NoRoom):
            return cause
        if isinstance(cause, OSError) and cause.errno in FULL:
            return NoRoom(f"no room on {_place(cause, folder)}: free space there, then start again")
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
    """The folder, with what is free on its disk."""
    named = error.filename2 or error.filename
    place = Path(os.fsdecode(named)).parent if isinstance(named, str | bytes) else folder
    try:
        usage = shutil.disk_usage(place)
    except OSError:
        return str(place)
    return f"{place} ({usage.free / 2**20:.0f} of {usage.total / 2**20:.0f} MiB are free)"
