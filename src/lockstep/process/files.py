"""Atomic file writes, checksums, and locks that end with the process. Imports no torch."""

import contextlib
import errno
import fcntl
import hashlib
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Lustre that is mounted without -o flock, and some network disks, answer with these.
NO_LOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def utc_now() -> str:
    """Return the time as `2026-11-21T10:30:12Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def write_atomically(path: Path, write: Callable[[Any], None], *, binary: bool = False) -> None:
    """Write beside the target, sync to disk, rename: a reader never sees a part of the file.

    Args:
        write: called with the open file.

    Raises:
        OSError: it names the target.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        # Text may hold a file name that is no UTF-8.
        mode = "xb" if binary else "x"
        encoding = None if binary else "utf-8"
        errors = None if binary else "backslashreplace"
        with part.open(mode, encoding=encoding, errors=errors) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(part)):
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some file systems cannot sync a folder.
        with contextlib.suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the sha256 of a whole file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock(handle: Any, wait_s: float = math.inf, *, required: bool = False) -> bool:
    """Take an exclusive lock that ends with the process.

    Args:
        required: raise OSError on a disk that has no locks. By default nothing is locked there.

    Returns:
        False if another process has held the lock for longer than `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        except OSError as error:
            if required or error.errno not in NO_LOCK_ERRNOS:
                raise
            return True


@contextlib.contextmanager
def locked_file(path: Path, wait_s: float = math.inf, *, required: bool = False) -> Iterator[bool]:
    """Hold `lock` on a lock file for the duration of the block.

    Yields:
        False if another process has held the lock for longer than `wait_s`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        is_locked = lock(file, wait_s, required=required)
        try:
            yield is_locked
        finally:
            # Closing is not enough: a child that was forked meanwhile has the handle too.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)
