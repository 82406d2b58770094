"""What old runs hold on this disk that their pages do not need: checkpoints, TensorBoard's files, copies, caches.

`python src/logbook.py prune` lists it and frees it. The record, the curves and the page of a run stay.
"""

import os
import shutil
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.runs.errors import UserError
from lockstep.runs.files import lock
from lockstep.runs.folder import RunFolder
from lockstep.runs.record import RunRecord, read_json, status_of
from lockstep.runs.typed_json import from_json

KINDS = ("checkpoints", "tensorboard")
COPIES = "from-rank-0"  # checkpoints that another node sent


@dataclass(frozen=True)
class Holding:
    """What may be freed of one run, or of a cache.

    Args:
        status: of the run; `cache` for what belongs to none.
        age_days: since the run was last heard of, or the cache last changed.
        paths: files and folders that may go, by kind.
    """

    name: str
    status: str
    is_kept: bool
    age_days: float
    paths: dict[str, list[Path]]

    def num_bytes(self, kind: str | None = None) -> int:
        """What the disk would gain: a file counts once, and not at all where a name of it stays elsewhere."""
        return disk_bytes(path for name, paths in self.paths.items() if kind in (None, name) for path in paths)

    def free(self) -> int:
        """Remove all of it; returns the bytes that the disk has gained."""
        before = self.num_bytes()
        for path in (path for paths in self.paths.values() for path in paths):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return before


def holdings(folders: Sequence[Path], kept: Collection[str], *, with_best: bool = False) -> list[Holding]:
    """Of runs that hold something and are not running.

    Args:
        kept: run ids of the logbook, whose best checkpoint stays.
        with_best: that goes too.
    """
    found = [held_by(RunFolder(path), path.name in kept, with_best) for path in folders]
    return [holding for holding in found if holding is not None and any(holding.paths.values())]


def held_by(folder: RunFolder, is_kept: bool, with_best: bool) -> Holding | None:
    """None where the run is running, or no record says whether it is."""
    try:
        record = from_json(RunRecord, read_json(folder.record), tolerant=True)
    except (UserError, OSError):
        return None
    status = status_of(record)
    if status == "running" or is_alive(folder):
        return None
    checkpoints = [
        path
        for path in sorted(folder.checkpoints.glob("*"))
        if with_best or not (is_kept and path.name.startswith("best-"))
    ]
    copies = [path for path in (folder.path / COPIES,) if path.exists()]
    events = [path for path in (folder.tensorboard,) if path.exists()]
    paths = {"checkpoints": checkpoints + copies, "tensorboard": events}
    return Holding(folder.run_id, status, is_kept, age_days(folder.record), paths)


def is_alive(folder: RunFolder) -> bool:
    """A process holds the run, whatever its record says."""
    if not folder.alive.exists():
        return False
    with folder.alive.open("a") as handle:
        return not lock(handle, wait_s=0)


def cache_of(logs: Path) -> list[Holding]:
    """Checkpoints that were fetched from a bucket to start from."""
    cache = logs / "cache"
    if not cache.is_dir() or not any(cache.iterdir()):
        return []
    return [Holding("cache", "cache", False, age_days(cache), {"checkpoints": [cache]})]


def age_days(path: Path) -> float:
    return (time.time() - path.stat().st_mtime) / 86_400


def disk_bytes(paths: Iterator[Path]) -> int:
    found = [file.lstat() for path in paths for file in files_under(path)]
    names = Counter((facts.st_dev, facts.st_ino) for facts in found)
    gone = {place: facts for facts in found if facts.st_nlink <= names[place := (facts.st_dev, facts.st_ino)]}
    return sum(facts.st_size for facts in gone.values())


def files_under(path: Path) -> Iterator[Path]:
    if not path.is_dir() or path.is_symlink():
        yield path
    for root, _, names in os.walk(path):
        yield from (Path(root) / name for name in names)


def listing(found: Sequence[Holding]) -> str:
    """One line a run, and their sum."""
    if not found:
        return ""
    rows: list[Sequence[str]] = [("run", "status", "age", *KINDS)]
    for holding in found:
        name = f"{holding.name} (kept: all but its best)" if holding.is_kept else holding.name
        sizes = [megabytes(holding.num_bytes(kind)) for kind in KINDS]
        rows.append((name, holding.status, f"{holding.age_days:.0f} d", *sizes))
    rows.append(("in all", "", "", *(megabytes(sum(holding.num_bytes(kind) for holding in found)) for kind in KINDS)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(f"{aligned(row, widths)}\n" for row in rows)


def aligned(row: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left, numbers to the right."""
    cells = [
        text.ljust(width) if i < 2 else text.rjust(width)
        for i, (text, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells)


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
