"""Files that are whole or not there, locks that go with the process, and times as text. Imports no torch."""

import contextlib
import errno
import fcntl
import hashlib
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
    """Now as `2026-11-21T10:30:12Z`."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_between(earlier: str, later: str) -> float:
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


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
    """How many bytes a file has, and their sha256 in hex."""

    bytes: int
    sha256: str


def checksum_of(path: Path) -> Checksum:
    return Checksum(path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    """In hex; reads the whole file."""
    return hash_of(path, "sha256")


def hash_of(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest()


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of some network file systems


def lock(handle: Any, wait_s: float | None = None, *, required: bool = False) -> bool:
    """An exclusive lock that goes with the process; False where another holds it for longer than `wait_s`.

    Where the disk has no locks, nothing is locked. What is let go before the process ends takes `locked`: to close is
    not enough while a child that was forked meanwhile has the handle too.

    Args:
        required: raise where the disk has no locks.
    """
    deadline = None if wait_s is None else time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if deadline is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if deadline is None or time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            return False
        except OSError as error:
            if required or error.errno not in NO_LOCKS:
                raise
        return True


@contextlib.contextmanager
def locked(handle: Any, wait_s: float | None = None, *, required: bool = False) -> Iterator[None]:
    """`lock` for as long as the block lasts."""
    lock(handle, wait_s, required=required)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked_file(path: Path, wait_s: float | None = None, *, required: bool = False) -> Iterator[None]:
    """The same by the path of a file that is there for nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, locked(file, wait_s, required=required):
        yield
