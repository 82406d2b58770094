"""Folders that the first process on a node builds and the others reuse.

A folder is complete or absent.
"""

import json
import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lockstep.process.errors import UserError, as_disk_full_error
from lockstep.process.files import locked_file, sync_folder

log = logging.getLogger(__name__)

META = "meta.json"
# A smaller folder is not worth a line in the log.
LARGE_BYTES = 10**8
# Values that JSON can hold, by name.
Content = dict[str, Any]


def load_or_build(folder: Path, build: Callable[[Path], Content]) -> Content:
    """Return the metadata of a cache folder.

    The first process builds the folder while others wait. A complete folder is read without a lock,
    so that it may be on a read-only disk or belong to another user.

    Args:
        build: writes files into an empty folder and returns its metadata.

    Raises:
        DiskFullError: the disk is full; nothing is left behind.
    """
    meta = folder / META
    if meta.exists():
        return json.loads(meta.read_text())

    with _locked(folder):
        # Another process may have built it while this one waited.
        if meta.exists():
            return json.loads(meta.read_text())
        content = _build(folder, build)

    if _size(folder) >= LARGE_BYTES:
        _log_size(folder.parent)
    return content


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache folder.

    Raises:
        UserError: the disk has no locks, or nobody may write there.
    """
    lock = locked_file(folder.with_name(f"{folder.name}.lock"), required=True)
    with ExitStack() as held:
        try:
            held.enter_context(lock)
        except OSError as error:
            raise UserError(
                f"{folder.parent} cannot be written or locked ({error.strerror}): "
                "give data.cache_dir=FOLDER on a local disk."
            ) from None
        yield


def _build(folder: Path, build: Callable[[Path], Content]) -> Content:
    """Build a folder beside its place and rename it; remove what is left of it after an error."""
    # On some shared disks a lock holds on one node alone, as on Lustre with localflock.
    part = folder.with_name(f".{folder.name}.{socket.gethostname()}.part")
    for incomplete in (folder, part):
        shutil.rmtree(incomplete, ignore_errors=True)
    try:
        part.mkdir()
        content = build(part)
        (part / META).write_text(json.dumps(content))
        for path in part.iterdir():
            _sync_file(path)
        try:
            os.replace(part, folder)
        except OSError:
            # Another node was faster, and its folder is whole.
            if not (folder / META).exists():
                raise
            content = json.loads((folder / META).read_text())
    except Exception as error:
        remedy = "give data.cache_dir=FOLDER on a larger disk"
        full_disk = as_disk_full_error(error, folder.parent, remedy)
        if full_disk is None:
            raise
        raise full_disk from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync_folder(folder.parent)
    return content


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _log_size(cache: Path) -> None:
    """Log what a cache takes of the disk, as nothing in it is ever deleted."""
    folders = [path.parent for path in cache.glob(f"[!.]*/{META}")]
    size = sum(map(_size, folders))
    log.info(
        f"{cache} holds {size / 1e9:.1f} GB of prepared images in {len(folders)} folders. "
        "You may delete it between runs, which prepare their images anew."
    )


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 if it is deleted meanwhile."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:
        return 0
