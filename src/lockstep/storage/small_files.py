"""The small files of a run folder (config, record, metrics, TensorBoard …) to and from the bucket."""

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.runs.folder import RunFolder
from lockstep.runs.foreign_files import NotReadable, parse_json
from lockstep.storage.bucket import copy_to_file, read_small
from lockstep.storage.object_store import never
from lockstep.storage.run_bucket import FILE_NAME, RunBucket

log = logging.getLogger(__name__)

SUFFIXES = (".yaml", ".json", ".csv", ".png", ".txt", ".diff", ".log")
# What a run records, none of which decides anything.
RECORDED = re.compile(
    r"run\.json|metrics\.csv|confusion_matrix\.csv|calibration\.csv|code\.diff|train\.log"
    r"|hardware-node\d{1,5}(\.\d{1,3})?\.csv|nvidia-smi-node\d{1,5}-(start|peak|end)\.txt"
)
MAX_FILE_BYTES, MAX_FILES = 64 * 2**20, 1000
NOT_OURS = ("generation.json", "best.json", "last.json")  # the bucket's own names in the run's prefix


class SmallFiles:
    """Sends those files of a run folder that changed since they were last sent."""

    def __init__(self, run: RunBucket, folder: RunFolder) -> None:
        self.run, self.folder = run, folder
        self._sent: dict[str, tuple[int, int]] = {}

    def send(self, cancelled: Callable[[], bool] = never) -> None:
        for relative, path in small_files(self.folder):
            try:
                facts = path.stat()
                state = (facts.st_mtime_ns, facts.st_size)
                if self._sent.get(relative) == state or not facts.st_size or cancelled():
                    continue
                self.run.store.put(self.run.file_key(relative), path, cancelled=cancelled)
            except FileNotFoundError:
                continue
            self._sent[relative] = state


def small_files(folder: RunFolder) -> Iterator[tuple[str, Path]]:
    """(name in the bucket, path); links are not followed, so nothing outside the folder is sent."""
    for path in sorted(folder.path.glob("*")):
        if path.suffix in SUFFIXES and path.name not in NOT_OURS and _is_plain(path):
            yield path.name, path
    for root, folders, names in os.walk(folder.tensorboard):
        folders[:] = [name for name in sorted(folders) if FILE_NAME.fullmatch(name)]
        for name in sorted(names):
            path = Path(root) / name
            if _is_plain(path):
                yield path.relative_to(folder.path).as_posix(), path


def _is_plain(path: Path) -> bool:
    return bool(FILE_NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink()


def restore_small_files(run: RunBucket, folder: RunFolder) -> list[str]:
    """Fetch what the run has recorded, so that its record and curves go on; what is here stays unless it is older.

    Its config.yaml goes to a place of its own, which says where it came from: others may write to the bucket. What
    this machine decides from (its config.yaml, its plan) only this machine writes.
    """
    overwrite = _updated_at(read_small(run.store, f"{run.root}run.json")[0]) > _updated_at(_bytes_of(folder.record))
    restored: list[str] = []
    for key, size in run.store.list(run.root):
        relative = key.removeprefix(run.root)
        target = folder.bucket_config if relative == folder.config.name else folder.path / relative
        stays = target.exists() and not overwrite and target != folder.bucket_config
        if not _is_recorded(relative) or stays:
            continue
        if size > MAX_FILE_BYTES or len(restored) == MAX_FILES:
            log.info(f"Passed over {run.store.root}{key}: it is far larger than what a run writes.")
            continue
        copy_to_file(run.store, key, target, MAX_FILE_BYTES)
        restored.append(relative)
    return restored


def _is_recorded(relative: str) -> bool:
    parts = relative.split("/")
    if len(parts) == 1:
        return bool(RECORDED.fullmatch(relative)) or relative == "config.yaml"
    return parts[0] == "tensorboard" and all(FILE_NAME.fullmatch(part) for part in parts)


def _updated_at(record: bytes | None) -> str:
    """The record's time stamp; times of this form sort as text."""
    try:
        return str(parse_json(record or b"{}").get("updated_at", ""))
    except (NotReadable, AttributeError):
        return ""


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
