"""Sharded checkpoints: each rank uploads the files that it holds, rank 0 the manifest, last.

Ranks meet in the bucket: rank 0 puts the manifest there when every file that it lists is there with the size and
sha256 that it states, and only then may a pointer name it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.storage.checkpoint_files import sha256_of
from lockstep.storage.outbox import Item, own_files
from lockstep.storage.run_bucket import FILE_NAME, MANIFEST, SHA256, RunBucket
from lockstep.storage.s3 import StoreError


class NotYet(Exception):
    """Another rank has not sent its files; try again soon. No failure."""


def send_shards(run: RunBucket, item: Item, rank: int, cancelled: Callable[[], bool]) -> dict[str, Any] | None:
    """Upload this rank's files; on rank 0 also the manifest: returns the entry for the pointer.

    Raises:
        NotYet: on rank 0, where files of other ranks are missing.
    """
    root = run.checkpoint_folder(item.kind, item.step)
    for name in own_files(item.path, rank):
        if name != MANIFEST and name not in item.sent:
            sha256 = sha256_of(item.path / name)
            run.bucket.put_file(item.path / name, root + _checked(name), sha256=sha256, cancelled=cancelled)
            item.sent.add(name)
    return _send_manifest(run, item, root) if rank == 0 else None


def _send_manifest(run: RunBucket, item: Item, root: str) -> dict[str, Any]:
    data = (item.path / MANIFEST).read_bytes()
    for name, facts in read_manifest(data).items():
        if name not in item.sent:
            if not _is_there(run, root + name, facts):
                raise NotYet
            item.sent.add(name)
    stored = run.bucket.put_bytes(root + MANIFEST, data)
    return {"key": stored.key, "bytes": stored.bytes, "sha256": stored.sha256}


def _is_there(run: RunBucket, key: str, facts: dict[str, Any]) -> bool:
    try:
        head = run.bucket.head(key)
    except StoreError as error:
        if error.kind == "missing":
            return False
        raise
    return head["ContentLength"] == facts["bytes"] and head["Metadata"].get("sha256") == facts["sha256"]


def _checked(name: str) -> str:
    if not FILE_NAME.fullmatch(name):
        raise StoreError("local", f"a file of the checkpoint cannot be a key: {name!r}")
    return name


def shards_of(folder: Path) -> dict[str, dict[str, Any]]:
    """{file name: {bytes, sha256}} of all ranks' files as the manifest in `folder` has them; empty without one."""
    try:
        return read_manifest((folder / MANIFEST).read_bytes())
    except (OSError, StoreError):
        return {}


def read_manifest(data: bytes) -> dict[str, dict[str, Any]]:
    """{file name: {bytes, sha256}}; names that could leave the folder are refused."""
    try:
        files = json.loads(data)["files"]
        checked: dict[str, dict[str, Any]] = {
            str(name): {"bytes": int(facts["bytes"]), "sha256": str(facts["sha256"])} for name, facts in files.items()
        }
    except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        raise StoreError("corrupt", "the manifest of a sharded checkpoint is not readable") from None
    if not all(FILE_NAME.fullmatch(name) and SHA256.fullmatch(facts["sha256"]) for name, facts in checked.items()):
        raise StoreError("corrupt", "the manifest of a sharded checkpoint names files that no rank writes")
    return checked
