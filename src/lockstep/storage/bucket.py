"""The store that a run's options name, and what is done with any store: small objects whole, large ones to a file."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.runs.files import write_atomically
from lockstep.storage.object_store import ObjectStore, StoreError
from lockstep.storage.s3 import S3Store
from lockstep.storage.s3_options import options_from

MAX_SMALL_BYTES = 2**20


def open_store(s3: Mapping[str, Any], uri: str | None = None) -> ObjectStore:
    """The store of the config group `s3`; `uri` in place of its own.

    Raises:
        UserError: an address or an option that is none.
    """
    return S3Store(options_from(s3, uri))


def read_small(store: ObjectStore, key: str) -> tuple[bytes | None, str | None]:
    """(content, ETag), or (None, None) where there is none; never more than MAX_SMALL_BYTES."""
    try:
        content = store.get(key)
    except StoreError as error:
        if error.kind == "missing":
            return None, None
        raise
    if content.num_bytes > MAX_SMALL_BYTES:
        raise StoreError("corrupt", f"{key} is far larger than what is written there")
    return b"".join(content.blocks), content.etag


def sha256_of_object(store: ObjectStore, key: str) -> str:
    """Of the bytes as they lie there now, all of which are read."""
    digest = hashlib.sha256()
    for block in store.get(key).blocks:
        digest.update(block)
    return digest.hexdigest()


def copy_to_file(store: ObjectStore, key: str, target: Path, max_bytes: int) -> None:
    """An object as a file, whole or not at all.

    Raises:
        StoreError: kind "corrupt" where it has more bytes than that.
    """
    content = store.get(key)
    if content.num_bytes > max_bytes:
        raise StoreError("corrupt", f"{key} is far larger than what is written there")
    write_atomically(target, lambda file: file.writelines(content.blocks), binary=True)
