"""How Lightning writes and reads checkpoint files here: whole or not at all, and never unpickling code."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO

from lockstep.runs.errors import UserError
from lockstep.runs.files import write_atomically
from lockstep.runs.old_configs import today
from lockstep.storage.checkpoint_content import Checkpoint, checked_checkpoint, load_plain, refused
from lockstep.storage.checkpoint_files import Measured, remove


class _Hashing:
    """A file that hashes what is written to it; torch.save only ever appends."""

    def __init__(self, file: Any) -> None:
        self.file, self.digest, self.bytes = file, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def write_checkpoint(checkpoint: Checkpoint, path: Path) -> Measured:
    """Write beside the target, sync, rename; returns size and hash of what was written."""
    written: list[_Hashing] = []

    def write(file: Any) -> None:
        written.append(_Hashing(file))
        torch.save(checkpoint, written[0])

    write_atomically(path, write, binary=True)
    return Measured(written[0].bytes, written[0].digest.hexdigest())


def read_checkpoint(
    path: str | Path, map_location: Any = "cpu", read_folder: Callable[[Path], Checkpoint] | None = None
) -> Checkpoint:
    """A checkpoint's tensors and plain values; nothing in the file chooses code to run.

    Args:
        read_folder: reads a folder of shards.

    Raises:
        UserError: there is no such file, or it is no checkpoint that can be loaded safely, whatever the damage.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"There is no checkpoint {path}.")
    with refused(path):
        of_shards = path.is_dir() and read_folder is not None
        checkpoint = checked_checkpoint(read_folder(path) if of_shards else load_plain(path, map_location))
    own = checkpoint.get("lockstep")
    if own and "config" in own:
        own["config"] = today(own["config"])
    return checkpoint


class CheckpointFiles(CheckpointIO):
    """Remembers size and hash of the file it wrote last, for the small file beside it."""

    def __init__(self, read_folder: Callable[[Path], Checkpoint] | None = None) -> None:
        self.read_folder = read_folder
        self.written: dict[str, Measured] = {}

    def save_checkpoint(self, checkpoint: Checkpoint, path: Any, storage_options: Any = None) -> None:
        self.written = {os.fspath(path): write_checkpoint(checkpoint, Path(path))}

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Checkpoint:
        return read_checkpoint(path, map_location or "cpu", self.read_folder)

    def remove_checkpoint(self, path: Any) -> None:
        remove(Path(path))
