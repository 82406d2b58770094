"""Files that are made once per node and shared by all its ranks: a lock, and folders that are complete or not there."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.files import NO_LOCKS, locked_file, sync_folder
from lockstep.runs.foreign_files import read_json
from lockstep.runs.full_disk import full_disk_named

META = "meta.json"
MAX_META_BYTES = 2**28  # it may name every image that was skipped
LARGER_DISK = "give data.cache_dir=FOLDER on a larger disk"
Content = dict[str, Any]  # JSON values that only `build` and its caller know


@contextmanager
def node_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel gives it back when the process dies, however it dies."""
    with ExitStack() as held:
        try:
            held.enter_context(locked_file(path, required=True))
        except OSError as error:
            reason = "cannot lock files" if error.errno in NO_LOCKS else f"cannot be written ({error.strerror})"
            raise UserError(f"{path.parent} {reason}: give data.cache_dir=FOLDER on a local disk that can.") from None
        yield


def cached(folder: Path, build: Callable[[Path], Content]) -> Content:
    """The meta data of a complete cache folder, which the first process on the node builds while others wait.

    Args:
        build: writes files into an empty folder and returns what meta.json shall hold.
    Raises:
        NoRoom: the disk is full, and nothing of it stays.
    """
    with folder_lock(folder):
        return cached_within_lock(folder, build, lambda _: True)


def folder_lock(folder: Path) -> AbstractContextManager[None]:
    """Of a cache folder: nobody else builds it meanwhile."""
    return node_lock(folder.with_name(f"{folder.name}.lock"))


def cached_within_lock(
    folder: Path, build: Callable[[Path], Content], is_current: Callable[[Content], bool]
) -> Content:
    """`cached` for who holds its lock, and reads its files before another may find them out of date.

    Args:
        is_current: whether what was built before still holds; else it is built anew.
    """
    meta = read_meta(folder)
    if meta is not None and is_current(meta):
        return meta
    shutil.rmtree(folder, ignore_errors=True)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        with full_disk_named(folder.parent, LARGER_DISK):
            meta = build(part)
            _seal(part, meta)
            os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(folder.parent)
    return read_meta(folder) or {}


def read_meta(folder: Path) -> Content | None:
    """What `build` returned, or None where the folder is missing or a file of it is not as it was written."""
    try:
        meta = read_json(folder / META, MAX_META_BYTES)
        if all((folder / name).stat().st_size == size for name, size in meta["files"].items()):
            return meta["content"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
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


def _seal(part: Path, content: Content) -> None:
    """Sync all files to disk and write meta.json, which names their sizes."""
    files = {path.name: path.stat().st_size for path in part.iterdir()}
    (part / META).write_text(json.dumps({"files": files, "content": content}))
    for path in part.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync_folder(part)
