"""Files that are made once per node and shared by all its ranks: a lock, and folders that are complete or not there."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.files import sync_folder

META = "meta.json"


@contextmanager
def node_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel gives it back when the process dies, however it dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"{path.parent} cannot be written ({error.strerror}): give data.cache_dir=FOLDER on a disk that can."
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise UserError(f"{path.parent} cannot lock files: give data.cache_dir=FOLDER on a local disk.") from None
        raise
    finally:
        os.close(handle)


def cached(folder: Path, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The meta data of a complete cache folder, which the first process on the node builds while others wait.

    Args:
        build: writes files into an empty folder and returns what meta.json shall hold.
    """
    with node_lock(folder.with_name(f"{folder.name}.lock")):
        meta = read_meta(folder)
        if meta is not None:
            return meta
        shutil.rmtree(folder, ignore_errors=True)
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            meta = build(part)
            _seal(part, meta)
            os.replace(part, folder)
        except OSError as error:
            shutil.rmtree(part, ignore_errors=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise UserError(
                    f"No space left in {folder.parent}: give data.cache_dir=FOLDER on a larger disk."
                ) from None
            raise
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        sync_folder(folder.parent)
        return read_meta(folder) or {}


def read_meta(folder: Path) -> dict[str, Any] | None:
    """What `build` returned, or None where the folder is missing or a file of it is not as it was written."""
    try:
        meta = json.loads((folder / META).read_text())
        if all((folder / name).stat().st_size == size for name, size in meta["files"].items()):
            return meta["content"]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # built anew
    return None


def file_identity(path: Path) -> list[Any]:
    """What tells, without reading it, that a file is the same as before."""
    stat = os.stat(path)
    return [str(path), stat.st_size, stat.st_mtime_ns]


def require_space(folder: Path, num_bytes: int) -> None:
    """Raises UserError where `folder`'s disk cannot hold that many bytes more."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise UserError(
            f"{folder} has {free / 2**30:.1f} GiB free, and the images need {num_bytes / 2**30:.1f} GiB: "
            "give data.cache_dir=FOLDER on a larger disk."
        )


def _seal(part: Path, content: dict[str, Any]) -> None:
    """Sync all files to disk and write meta.json, which names their sizes."""
    files = {path.name: path.stat().st_size for path in part.iterdir()}
    (part / META).write_text(json.dumps({"files": files, "content": content}))
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(part)
