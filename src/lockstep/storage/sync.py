"""Copy a prefix of a bucket to the disk of this node before training. Imports no torch.

    folder = sync("s3://bucket/photographs", Path("data/cache"), config["s3"])      # then read files as from any folder

Every rank may call it: the first one on a node copies, the others wait for it and find everything there.
"""

import contextlib
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lockstep.runs.errors import UserError
from lockstep.runs.files import locked_file, write_atomically
from lockstep.storage.errors import S3Error, translated
from lockstep.storage.s3 import Bucket, Progress

log = logging.getLogger(__name__)

THREADS, TRIES = 16, 5
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
    bucket, name = Bucket.of(s3 or {}, uri), ""
    try:
        wanted = {key: (size, etag) for key, size, etag in bucket.list() if not key.endswith("/")}
        if not wanted and bucket.prefix:  # it may be one object
            stem, _, name = uri.rstrip("/").rpartition("/")
            bucket = Bucket.of(s3 or {}, stem)
            wanted = {key: (size, etag) for key, size, etag in bucket.list(name) if key == name}
        if not wanted:
            raise UserError(f"{uri}: there is nothing under this prefix in the bucket.")
        for key in wanted:
            if {"", ".", ".."} & set(key.split("/")) or "\\" in key or key == SYNCED:
                raise UserError(f"{uri} holds the key {key!r}, which cannot be a file of a folder.")
        place = hashlib.sha256(f"{bucket.endpoint_url}{bucket.address('')}".encode()).hexdigest()[:8]
        folder = cache.absolute() / f"{bucket.name}-{place}"
        with locked_file(folder.with_name(f"{folder.name}.lock")):
            _copy(bucket, wanted, folder)
        return folder / name
    except S3Error as error:
        raise UserError(f"{uri} cannot be read: {error}.") from None


def _copy(bucket: Bucket, wanted: dict[str, tuple[int, str]], folder: Path) -> None:
    marks, here = folder / SYNCED, set()
    for line in marks.read_text().splitlines() if marks.exists() else ():
        with contextlib.suppress(ValueError):  # a kill may have cut the last line
            key, etag = json.loads(line)
            path = folder / key
            if path.is_file() and wanted.get(key) == (path.stat().st_size, etag):
                here.add(key)
            else:
                path.unlink(missing_ok=True)
    missing, total = sorted(wanted.keys() - here), sum(size for size, _ in wanted.values())
    progress = Progress(f"copying {bucket.uri}", total, sum(wanted[key][0] for key in here))
    folder.mkdir(parents=True, exist_ok=True)
    left, free = total - progress.done, shutil.disk_usage(folder).free
    if left > free:
        raise UserError(
            f"{bucket.uri} needs {left / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free: give "
            "data.cache_dir=FOLDER on a larger disk, or mount the bucket and give data.root=/mnt/…."
        )
    if missing:
        log.info(f"Copying {bucket.uri} to {folder}: {len(missing):,} files, {left / 1e6:,.0f} MB …")
    lines = {key: json.dumps((key, etag)) + "\n" for key, (_, etag) in wanted.items()}
    write_atomically(marks, lambda file: file.writelines(lines[key] for key in here))
    with marks.open("a") as file, ThreadPoolExecutor(THREADS, "sync") as pool:

        def copy(key: str) -> None:
            _fetch(bucket, key, *wanted[key], folder / key, progress)
            file.write(lines[key])
            file.flush()

        list(pool.map(copy, missing))  # after an error those that have not begun are cancelled


def _fetch(bucket: Bucket, key: str, size: int, etag: str, path: Path, progress: Progress) -> None:
    """Fetch one object, from where an earlier try or process broke off."""
    part = path.with_name(f".{path.name[:100]}.{etag[:16]}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    for attempt in range(TRIES):
        try:
            with part.open("ab") as file, translated(bucket):
                if file.tell() < size:
                    answer = bucket.call("get_object", key, Range=f"bytes={file.tell()}-", IfMatch=f'"{etag}"')
                    for block in answer["Body"].iter_chunks(2**20):
                        file.write(block)
                        progress(len(block))
            break
        except S3Error as error:
            if attempt + 1 == TRIES or error.code in ("AccessDenied", "NoSuchKey", "PreconditionFailed"):
                raise
            time.sleep(2**attempt)
    if part.stat().st_size != size:
        part.unlink()
        raise S3Error(f"{key} has not the {size} bytes that the bucket lists")
    part.replace(path)
