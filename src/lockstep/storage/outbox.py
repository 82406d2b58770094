"""The checkpoints that wait for their upload, on disk: `<run folder>/upload/`, one folder for each.

A checkpoint is linked, not copied: its files never change once they are complete, and a link costs microseconds and
no space, while training deletes or replaces its own name for the file as it likes.
"""

import errno
import json
import os
import re
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.runs.files import locked, write_atomically

ITEM = "item.json"
START, START_LOCK = "start.json", "start.lock"
ENTRY = re.compile(r"rank(\d{5})-(best|last)-step\d+")
SHARD = re.compile(r"shard-(\d{5})-")  # counted from 1, as torch.distributed.checkpoint names them
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


@dataclass
class Item:
    """Something to upload.

    Args:
        kind: best, last, or files (the run's small files, which are not spooled).
        path: the checkpoint in the spool: a file, or the folder with this rank's files of a sharded one.
        entry: its folder in the spool; None where it is not spooled.
        generation: of the start that saved it, where it had one.
        adopted: left by an earlier process; goes nowhere where the bucket names a later step.
        sent: of a sharded checkpoint, the files that are known to be in the bucket.
    """

    kind: str
    path: Path = Path()
    sidecar: dict[str, Any] = field(default_factory=dict)
    entry: Path | None = None
    not_before: float = 0.0
    urgent: bool = False
    generation: int = 0
    adopted: bool = False
    sent: set[str] = field(default_factory=set)

    @property
    def step(self) -> int:
        return int(self.sidecar.get("step", 0))


class Spool:
    """
    Args:
        folder: made when the first checkpoint comes.
        rank: ranks that share a disk keep their files apart.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self._noting = threading.Lock()

    def add(self, kind: str, path: Path, sidecar: dict[str, Any], generation: int = 0) -> Item:
        """Link a checkpoint into the spool; where the disk has no room for even that, the item names the original."""
        entry = self.folder / f"rank{self.rank:05d}-{kind}-step{int(sidecar.get('step', 0)):08d}"
        item = Item(kind, entry / path.name, sidecar, entry, generation=generation)
        description = json.dumps({"kind": kind, "name": path.name, "sidecar": sidecar, "generation": generation})
        shutil.rmtree(entry, ignore_errors=True)
        try:
            _link(path, item.path, own_files(path, self.rank) if path.is_dir() else None)
            write_atomically(entry / ITEM, lambda file: file.write(description))
        except OSError as error:
            shutil.rmtree(entry, ignore_errors=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return Item(kind, path, sidecar, generation=generation)
        return item

    def note(self, **facts: Any) -> None:
        """Keep facts of this start for whoever finishes its uploads: generation, flush_left_s, deadline."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # The uploading thread and the training one both do, and other ranks that share the folder.
        with self._noting, (self.folder / START_LOCK).open("w") as file, locked(file, wait_s=2.0):
            text = json.dumps({**self.notes(), **facts})
            write_atomically(self.folder / START, lambda file: file.write(text))

    def notes(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / START).read_text()))
        except (OSError, ValueError, TypeError):
            return {}

    def drop(self, item: Item) -> None:
        if item.entry is not None:
            shutil.rmtree(item.entry, ignore_errors=True)

    def ranks(self) -> list[int]:
        """Whose checkpoints lie here."""
        found = {int(match[1]) for path in self.folder.glob("rank*") if (match := ENTRY.match(path.name))}
        return sorted(found)

    def left(self) -> list[Item]:
        """What an earlier process did not send: the newest of each kind; anything else is removed."""
        newest: dict[str, Item] = {}
        for entry in sorted(self.folder.glob(f"rank{self.rank:05d}-*")):
            item = _read_entry(entry)
            if item is None:
                shutil.rmtree(entry, ignore_errors=True)
                continue
            older = newest.get(item.kind)
            if older is not None:
                self.drop(older)  # the names sort by step
            newest[item.kind] = item
        return list(newest.values())


def own_files(folder: Path, rank: int) -> list[str]:
    """The files of a sharded checkpoint that this rank uploads: its shards, and on rank 0 what is no rank's."""
    return sorted(path.name for path in folder.iterdir() if path.is_file() and _owner(path.name) == rank)


def _owner(name: str) -> int:
    match = SHARD.match(name)
    return int(match[1]) - 1 if match else 0


def _read_entry(entry: Path) -> Item | None:
    try:
        fields = json.loads((entry / ITEM).read_text())
        path = entry / Path(fields["name"]).name
        item = Item(fields["kind"], path, fields["sidecar"], entry, generation=fields["generation"], adopted=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return item if path.exists() and item.kind in ("best", "last") else None


def _link(source: Path, target: Path, names: list[str] | None) -> None:
    if names is not None:
        for name in names:
            _link(source / name, target / name, None)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(source, target)
