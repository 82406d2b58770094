"""Copy a prefix of a bucket to the disk of this node before training. Imports no torch.

Every rank may call `sync`: the first one on a node copies, the others wait for it and find everything there.
"""

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

THREADS, PAUSES_S = 16, (1, 2, 4, 8, None)
SYNCED = ".synced"  # a line for each file that is here whole, with its ETag


def sync(uri: str, cache: Path, s3: Mapping[str, Any] | None = None) -> Path:
    """Return the folder (or the file, if `uri` names an object) with the current content of the bucket.

    Files whose size and ETag are still those of the bucket stay, also those that a killed process has copied; files
    that are no longer in the bucket are deleted.

    Args:
        cache: a folder on the disk of this node.
        s3: the config's node s3 (endpoint_url); its own uri is not used.
    Raises:
        UserError: the bucket cannot be read, nothing lies there, or the disk has no room for it.
    """
    bucket, name = Bucket.of(s3 or {}, uri), ""
    try:
        wanted = {key: (size, etag) for key, size, etag in bucket.list() if not key.endswith("/")}
        if not wanted and bucket.prefix:  # it may be one object
            above, _, name = uri.rstrip("/").rpartition("/")
            bucket = Bucket.of(s3 or {}, above)
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
    except S3Error as error:
        raise UserError(f"{uri} cannot be read: {error}.") from None
    return folder / name


def _copy(bucket: Bucket, wanted: dict[str, tuple[int, str]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    marks, here = folder / SYNCED, set()
    for line in marks.read_text().split("\n")[:-1] if marks.exists() else []:  # without one that a kill has cut
        key, etag = json.loads(line)
        if (folder / key).is_file() and wanted.get(key) == ((folder / key).stat().st_size, etag):
            here.add(key)
        else:
            (folder / key).unlink(missing_ok=True)
    missing = sorted(wanted.keys() - here)
    left, free = sum(wanted[key][0] for key in missing), shutil.disk_usage(folder).free
    if left > free:
        raise UserError(
            f"{bucket.uri} needs {left / 1e9:.1f} GB and {folder} has {free / 1e9:.1f} GB free: give "
            "data.cache_dir=FOLDER on a larger disk, or mount the bucket and give data.root=/mnt/…."
        )
    if missing:
        log.info(f"Copying {bucket.uri} to {folder}: {len(missing):,} files, {left / 1e6:,.0f} MB …")
    line_of = {key: json.dumps((key, etag)) + "\n" for key, (_, etag) in wanted.items()}
    write_atomically(marks, lambda file: file.writelines(line_of[key] for key in here))
    progress = Progress(f"copying {bucket.uri}", left)
    with marks.open("a") as file, ThreadPoolExecutor(THREADS, "sync") as pool:

        def copy(key: str) -> None:
            _fetch(bucket, key, *wanted[key], folder / key, progress)
            file.write(line_of[key])
            file.flush()

        list(pool.map(copy, missing))  # after an error those that have not begun are cancelled


def _fetch(bucket: Bucket, key: str, size: int, etag: str, path: Path, progress: Progress) -> None:
    """Fetch one object, from where an earlier try or process broke off; boto3 checks the number of bytes."""
    part = path.with_name(f".{path.name[:100]}.{etag[:16]}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    for pause_s in PAUSES_S:
        try:
            with part.open("ab") as file, translated(bucket):
                if file.tell() < size:
                    answer = bucket.call("get_object", key, Range=f"bytes={file.tell()}-", IfMatch=f'"{etag}"')
                    for block in answer["Body"].iter_chunks(2**20):
                        file.write(block)
                        progress(len(block))
            break
        except S3Error as error:
            if pause_s is None or error.code in ("AccessDenied", "NoSuchKey", "PreconditionFailed"):
                raise
            time.sleep(pause_s)
    part.replace(path)
