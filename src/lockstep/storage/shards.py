"""Sharded checkpoints: each rank uploads the files that it holds, rank 0 the manifest, last.

Ranks meet in the bucket: rank 0 puts the manifest there when every file that it lists is there with the size and
sha256 that it states, and only then may a pointer name it.
"""

from collections.abc import Callable
from pathlib import Path

from lockstep.runs.files import Checksum, sha256_of
from lockstep.runs.foreign_files import parse_json
from lockstep.storage.checkpoint_files import parse_checksums
from lockstep.storage.object_store import StoredObject, StoreError
from lockstep.storage.outbox import Item, own_files
from lockstep.storage.pointer import MANIFEST, NOT_READABLE, SHA256
from lockstep.storage.run_bucket import FILE_NAME, RunBucket


class NotYet(Exception):
    """Another rank has not sent its files; try again soon. No failure."""


def send_shards(run: RunBucket, item: Item, rank: int, cancelled: Callable[[], bool]) -> StoredObject | None:
    """Upload this rank's files; on rank 0 also the manifest: returns what a pointer may name.

    Raises:
        NotYet: on rank 0, where files of other ranks are missing.
    """
    root = run.checkpoint_folder(item.kind, item.step)
    for name in own_files(item.path, rank):
        if name != MANIFEST and name not in item.sent:
            path = item.path / name
            run.store.put(root + _checked(name), path, sha256=sha256_of(path), cancelled=cancelled)
            item.sent.add(name)
    return _send_manifest(run, item, root) if rank == 0 else None


def _send_manifest(run: RunBucket, item: Item, root: str) -> StoredObject:
    data = (item.path / MANIFEST).read_bytes()
    for name, checksum in read_manifest(data).items():
        if name not in item.sent:
            if not _is_there(run, root + name, checksum):
                raise NotYet
            item.sent.add(name)
    return run.store.put(root + MANIFEST, data)


def _is_there(run: RunBucket, key: str, checksum: Checksum) -> bool:
    try:
        found = run.store.head(key)
    except StoreError as error:
        if error.kind == "missing":
            return False
        raise
    return Checksum(found.bytes, found.sha256) == checksum


def _checked(name: str) -> str:
    if not FILE_NAME.fullmatch(name):
        raise StoreError("local", f"a file of the checkpoint cannot be a key: {name!r}")
    return name


def shards_of(folder: Path) -> dict[str, Checksum]:
    """All ranks' files by their names as the manifest in `folder` has them; empty without one."""
    try:
        return read_manifest((folder / MANIFEST).read_bytes())
    except (OSError, StoreError):
        return {}


def read_manifest(data: bytes) -> dict[str, Checksum]:
    """The files that a manifest lists, by their names; names that could leave the folder are refused."""
    try:
        files = parse_checksums(parse_json(data)["files"])
    except NOT_READABLE:
        raise StoreError("corrupt", "the manifest of a sharded checkpoint is not readable") from None
    if not all(FILE_NAME.fullmatch(name) and SHA256.fullmatch(file.sha256) for name, file in files.items()):
        raise StoreError("corrupt", "the manifest of a sharded checkpoint names files that no rank writes")
    return files
