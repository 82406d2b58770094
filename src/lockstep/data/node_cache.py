"""Folders that the first process on a node builds and the others reuse; a folder is complete or absent."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError, no_room
from lockstep.runs.files import locked_file, sync_folder

META = "meta.json"
Content = dict[str, Any]  # JSON values


def cached(folder: Path, build: Callable[[Path], Content]) -> Content:
    """Return the metadata of a cache folder; the first process builds the folder while others wait.

    A complete folder is read without a lock, so that it may be on a read-only disk or belong to another user.

    Args:
        build: writes files into an empty folder and returns its metadata.
    Raises:
        NoRoom: the disk is full; nothing is left behind.
    """
    meta, part = folder / META, folder.with_name(f".{folder.name}.part")
    with ExitStack() as held:
        try:
            if not meta.exists():
                held.enter_context(locked_file(folder.with_name(f"{folder.name}.lock"), required=True))
        except OSError as error:
            reason = f"cannot be written or locked ({error.strerror}): give data.cache_dir=FOLDER on a local disk"
            raise UserError(f"{folder.parent} {reason}.") from None
        if meta.exists():
            return json.loads(meta.read_text())
        for incomplete in (folder, part):
            shutil.rmtree(incomplete, ignore_errors=True)
        part.mkdir()
        held.callback(shutil.rmtree, part, ignore_errors=True)
        try:
            content = build(part)
            (part / META).write_text(json.dumps(content))
            for path in part.iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            os.replace(part, folder)
        except Exception as error:
            raise no_room(error, folder.parent, "give data.cache_dir=FOLDER on a larger disk") or error from None
        sync_folder(folder.parent)
        return content
