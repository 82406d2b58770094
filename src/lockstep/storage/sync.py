"""Copy a prefix of a bucket to the disk of this node before training. Imports no torch.

    folder = sync("s3://bucket/photographs", Path("data/cache"), config["s3"])      # then read files as from any folder

Every rank may call it: the first one on a node copies, the others wait for it and find everything there.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file, write_atomically
from lockstep.storage.errors import S3Error
from lockstep.storage.s3 import Bucket, Progress

log = logging.getLogger(__name__)

THREADS = 16
TRIES = 5
SYNCED = ".synced"  # a line for each file that is here whole, with its ETag


def sync(uri: str, cache: Path, s3: Mapping[str, Any] | None = None) -> Path:
    """Return the folder (or the file, if `uri` names an object) that has what lies in the bucket now.

    Files whose size and ETag are still those of the bucket stay, also those that a killed process has copied; files
    that are no longer in the bucket are deleted.

    Args:
        uri: s3://bucket/prefix, or s3://bucket/key of one object.
        cache: a folder on the disk of this node.
        s3: the config group s3 (endpoint_url); its own uri is not used.
    Raises:
        UserError: the bucket cannot be read, nothing lies there, or the disk has no room for it.
    """
    bucket = Bucket.of(s3 or {}, uri)
    try:
        wanted = {key: (size, etag) for key, size, etag in bucket.list() if not key.endswith("/")}
        if not wanted and bucket.prefix:  # it may be one object
            stem, _, name = uri.rstrip("/").rpartition("/")
            bucket = Bucket.of(s3 or {}, stem)
            wanted = {key: (size, etag) for key, size, etag in bucket.list(name) if key == name}
    except S3Error as error:
        raise UserError(f"{uri} cannot be read: {error}.") from None
    if not wanted:
        raise UserError(f"{uri}: there is nothing under this prefix in the bucket.")
    if bad := next((key for key in wanted if not _stays_inside(key)), None):
        raise UserError(f"{uri} holds the key {bad!r}, which cannot be a file of a folder.")
    place = hashlib.sha256(f"{bucket.endpoint_url}{bucket.address('')}".encode()).hexdigest()[:8]
    folder = cache.absolute() / f"{bucket.name}-{place}"
    with locked_file(folder.with_name(f"{folder.name}.lock")):
        _copy(bucket, wanted, folder)
    return folder if uri.rstrip("/") == bucket.uri.rstrip("/") else folder / next(iter(wanted))


def _stays_inside(key: str) -> bool:
    return not any(part in ("", ".", "..") for part in key.split("/")) and "\\" not in key and key != SYNCED


def _copy(bucket: Bucket, wanted: dict[str, tuple[int, str]], folder: Path) -> None:
    here = _read_synced(folder)
    whole = {key for key in here if key in wanted and (_size_of(folder / key), here[key]) == wanted[key]}
    for key in here.keys() - whole:
        (folder / key).unlink(missing_ok=True)
    missing, total = sorted(wanted.keys() - whole), sum(size for size, _ in wanted.values())
    progress = Progress(f"copying {bucket.uri}", total, sum(wanted[key][0] for key in whole))
    folder.mkdir(parents=True, exist_ok=True)
    left, free = total - progress.done, shutil.disk_usage(folder).free
    if left > free:
        raise UserError(
            f"{bucket.uri} needs {left / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free: give "
            "data.cache_dir=FOLDER on a larger disk, or mount the bucket and give data.root=/mnt/…."
        )
    if missing:
        log.info(f"Copying {bucket.uri} to {folder}: {len(missing):,} files, {left / 1e6:,.0f} MB …")
    write_atomically(folder / SYNCED, lambda file: file.writelines(_line(key, here[key]) for key in whole))
    pool = ThreadPoolExecutor(THREADS, "sync")
    try:
        with (folder / SYNCED).open("a") as synced:
            for future in [pool.submit(_fetch, bucket, key, *wanted[key], folder, synced, progress) for key in missing]:
                future.result()
    except S3Error as error:
        raise UserError(f"{bucket.uri} cannot be copied: {error}. Start again to go on.") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _read_synced(folder: Path) -> dict[str, str]:
    path, here = folder / SYNCED, {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):  # a kill may have cut the last line
            key, here[key] = json.loads(line)
    return here


def _line(key: str, etag: str) -> str:
    return json.dumps([key, etag]) + "\n"


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _fetch(bucket: Bucket, key: str, size: int, etag: str, folder: Path, synced: TextIO, progress: Progress) -> None:
    """Fetch one object, from where an earlier try or process broke off."""
    path = folder / key
    part = path.with_name(f".{path.name[:100]}.{etag[:16]}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(TRIES):
        with part.open("ab") as file:
            try:
                if file.tell() < size:
                    answer = bucket.call("get_object", key, Range=f"bytes={file.tell()}-", IfMatch=f'"{etag}"')
                    with bucket.translated():
                        for block in answer["Body"].iter_chunks(2**20):
                            file.write(block)
                            progress(len(block))
            except S3Error as error:
                if attempt + 1 == TRIES or error.code in ("AccessDenied", "NoSuchKey", "PreconditionFailed"):
                    raise
                time.sleep(2**attempt)
        if part.stat().st_size == size:
            synced.write(_line(key, etag))
            synced.flush()
            return os.replace(part, path)
    part.unlink()
    raise S3Error(f"{key} has not the {size} bytes that the bucket lists")
