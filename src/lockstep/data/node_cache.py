"""Cache folders of a node. The first process builds a folder, and the others reuse it.

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
# JSON values by name.
Metadata = dict[str, Any]


def load_or_build(folder: Path, build: Callable[[Path], Metadata]) -> Metadata:
    """Return the metadata of a cache folder.

    The first process builds the folder while others wait. A complete folder is read without a lock,
    so it may lie on a read-only disk or belong to another user.

    Args:
        build: a function that writes files into an empty folder and returns its metadata.

    Raises:
        DiskFullError: the disk is full. The incomplete folder is removed.
    """
    meta = folder / META
    if meta.exists():
        return json.loads(meta.read_text())

    with _hold_lock(folder):
        # Another process may have built it while this one waited.
        if meta.exists():
            return json.loads(meta.read_text())
        metadata = _build(folder, build)

    if _folder_size(folder) >= LARGE_BYTES:
        _log_size(folder.parent)
    return metadata


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache folder.

    Raises:
        UserError: the disk has no locks, or nobody may write there.
    """
    lock = locked_file(folder.with_name(f"{folder.name}.lock"), required=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except OSError as error:
            raise UserError(
                f"{folder.parent} cannot be written or locked ({error.strerror}): "
                "give data.cache_dir=FOLDER on a local disk."
            ) from None
        yield


def _build(folder: Path, build: Callable[[Path], Metadata]) -> Metadata:
    """Build a folder under another name and rename it. After an error remove it."""
    # On some shared disks, as Lustre with localflock, a lock holds on one node only. So two nodes
    # may build the same folder.
    part = folder.with_name(f".{folder.name}.{socket.gethostname()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        metadata = build(part)
        (part / META).write_text(json.dumps(metadata))
        for path in part.iterdir():
            _sync_file(path)
        try:
            os.replace(part, folder)
        except OSError:
            # Another node was faster, and its folder is whole.
            if (folder / META).exists():
                return json.loads((folder / META).read_text())
            # Its files were deleted in part.
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(part, folder)
    except Exception as error:
        remedy = "give data.cache_dir=FOLDER on a larger disk"
        full_disk = as_disk_full_error(error, folder.parent, remedy)
        if full_disk is None:
            raise
        raise full_disk from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    sync_folder(folder.parent)
    return metadata


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _log_size(cache: Path) -> None:
    """Log the size of a cache, because nothing in it is ever deleted."""
    folders = [path.parent for path in cache.glob(f"[!.]*/{META}")]
    size = sum(map(_folder_size, folders))
    log.info(
        f"{cache} holds {size / 1e9:.1f} GB of prepared images in {len(folders)} folders. "
        "You may delete it between runs, which prepare their images anew."
    )


def _folder_size(folder: Path) -> int:
    """Return the bytes of the files in a folder; 0 if another process deletes it meanwhile."""
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except FileNotFoundError:
        return 0
