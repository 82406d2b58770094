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

from lockstep.runs.files import locked_file, write_atomically
from lockstep.runs.foreign_files import read_json
from lockstep.runs.full_disk import is_full
from lockstep.storage.checkpoint_files import Sidecar, is_number, parse_sidecar

ITEM = "item.json"
START, START_LOCK = "start.json", "start.lock"
ENTRY = re.compile(r"rank(\d{5})-(best|last)-step\d+")
SHARD = re.compile(r"shard-(\d{5})-")  # counted from 1, as torch.distributed.checkpoint names them
NO_LINKS = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)


@dataclass
class Item:
    """Something to upload.

    Args:
        kind: best, last, or files (the run's small files, which the outbox does not hold).
        path: the checkpoint in the outbox: a file, or the folder with this rank's files of a sharded one.
        entry: its folder in the outbox; None where it is not there.
        generation: of the start that saved it, where it had one.
        adopted: left by an earlier process; goes nowhere where the bucket names a later step.
        sent: of a sharded checkpoint, the files that are known to be in the bucket.
    """

    kind: str
    path: Path = Path()
    sidecar: Sidecar = field(default_factory=lambda: Sidecar(step=0))
    entry: Path | None = None
    not_before: float = 0.0
    urgent: bool = False
    generation: int = 0
    adopted: bool = False
    sent: set[str] = field(default_factory=set)

    @property
    def step(self) -> int:
        return self.sidecar.step


@dataclass(frozen=True)
class Notes:
    """What a start leaves for whoever finishes its uploads.

    generation: of the start in the bucket; None where it never reached it.
    flush_left_s: how long the end of the run may still wait for uploads.
    deadline: when this machine goes (time.time()).
    """

    generation: int | None = None
    flush_left_s: float | None = None
    deadline: float | None = None


class Outbox:
    """
    Args:
        folder: made when the first checkpoint comes.
        rank: ranks that share a disk keep their files apart.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.rank = folder, rank
        self._noting = threading.Lock()

    def add(self, kind: str, path: Path, sidecar: Sidecar, generation: int = 0) -> Item:
        """Link a checkpoint into the outbox; where the disk has no room for even that, the item names the original."""
        entry = self.folder / f"rank{self.rank:05d}-{kind}-step{sidecar.step:08d}"
        item = Item(kind, entry / path.name, sidecar, entry, generation=generation)
        held = {"kind": kind, "name": path.name, "sidecar": sidecar.as_json(), "generation": generation}
        shutil.rmtree(entry, ignore_errors=True)
        try:
            _link(path, item.path, None)
            write_atomically(entry / ITEM, lambda file: file.write(json.dumps(held)))
        except OSError as error:
            shutil.rmtree(entry, ignore_errors=True)
            if not is_full(error):
                raise
            return Item(kind, path, sidecar, generation=generation)
        return item

    def note(self, **known: float | None) -> None:
        """Keep values of Notes by their names; the others stay as they are."""
        # The uploading thread and the training one both do, and other ranks that share the folder.
        with self._noting, locked_file(self.folder / START_LOCK, wait_s=2.0):
            text = json.dumps({**self._noted(), **known})
            write_atomically(self.folder / START, lambda file: file.write(text))

    def notes(self) -> Notes:
        noted = self._noted()
        generation = noted.get("generation")
        return Notes(None if generation is None else int(generation), noted.get("flush_left_s"), noted.get("deadline"))

    def _noted(self) -> dict[str, float | None]:
        try:
            held = read_json(self.folder / START).items()
        except (OSError, ValueError, AttributeError):
            return {}
        return {name: value for name, value in held if value is None or is_number(value)}

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


def _read_entry(entry: Path) -> Item | None:
    try:
        held = read_json(entry / ITEM)
        path, sidecar = entry / Path(held["name"]).name, parse_sidecar(held["sidecar"])
        kind, generation = str(held["kind"]), int(held["generation"])
    except (OSError, ValueError, OverflowError, KeyError, TypeError):
        return None
    if sidecar is None or not path.exists() or kind not in ("best", "last"):
        return None
    return Item(kind, path, sidecar, entry, generation=generation, adopted=True)


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
