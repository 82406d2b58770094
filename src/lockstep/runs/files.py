"""Files that are whole or not there, locks that go with the process, and times as text. Imports no torch."""

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lockstep.runs.full_disk import full_disk_named


def utc_now() -> str:
    """Return the time as `2026-11-21T10:30:12Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_atomically(path: Path, write: Callable[[Any], None], *, binary: bool = False) -> None:
    """Write beside the target, sync to disk, rename: a reader sees the old file or the new one, never a part.

    Args:
        write: called with the open file.

    Raises:
        NoRoom: the disk is full, and the target as it was.
        OSError: names the target.
    """
    with full_disk_named(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        try:
            # Text may hold a file name that is no UTF-8.
            text: dict[str, Any] = {} if binary else {"encoding": "utf-8", "errors": "backslashreplace"}
            with os.fdopen(handle, "wb" if binary else "w", **text) as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException as error:
            Path(name).unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno and error.filename is None:
                error.filename = os.fspath(path)
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Checksum:
    """The number of bytes of a file, and their sha256 in hex."""

    bytes: int
    sha256: str


def checksum_of(path: Path) -> Checksum:
    return Checksum(path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    """Return the sha256 of a whole file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network file systems


def lock(handle: Any, wait_s: float = math.inf, *, required: bool = False) -> bool:
    """Take an exclusive lock that goes with the process; False if another holds it for longer than `wait_s`.

    Nothing is locked on a disk without locks.

    Args:
        required: raise on a disk without locks.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
            continue
        except OSError as error:
            if required or error.errno not in NO_LOCKS:
                raise
        return True


@contextlib.contextmanager
def locked_file(path: Path, wait_s: float = math.inf, *, required: bool = False) -> Iterator[None]:
    """Hold `lock` on a file that is there for nothing else, for as long as the block lasts.

    It is unlocked, not only closed: a child that was forked meanwhile has the handle too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        lock(file, wait_s, required=required)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
